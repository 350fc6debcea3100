/* test_system.c - tests how moe.c reads the limits of the machine, with made-up files in place of /proc and /sys. */
#define MOE_SYSTEM "system"
#include "moe.c"

#include "tests/test.h"

static void put(const char *path, const char *text) {
    char full[256];
    snprintf(full, sizeof full, MOE_SYSTEM "%s", path);
    for (char *at = full; (at = strchr(at + 1, '/'));) *at = 0, mkdir(full, 0700), *at = '/';
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

typedef struct system_file {
    const char *path, *text;
} system_file;

typedef struct group_case {
    system_file files[5];
    uint64_t memory, processors; /* expected limits; 0 for none */
} group_case;

static const group_case cases[] = {
    { { { "/proc/self/cgroup", "" } }, 0, 0 },
    { { { "/proc/self/cgroup", "0::/\n" },
        { "/sys/fs/cgroup/cpu.max", "max 100000\n" },
        { "/sys/fs/cgroup/memory.max", "max\n" } },
      0,
      0 },
    { { { "/proc/self/cgroup", "0::/\n" },
        { "/sys/fs/cgroup/cpu.max", "200000 100000\n" },
        { "/sys/fs/cgroup/memory.max", "1073741824\n" } },
      1 << 30,
      2 },
    { { { "/proc/self/cgroup", "0::/\n" }, { "/sys/fs/cgroup/cpu.max", "150000 100000\n" } }, 0, 2 },
    { { { "/proc/self/cgroup", "0::/\n" }, { "/sys/fs/cgroup/cpu.max", "5000 100000\n" } }, 0, 1 },
    /* the parent's limit is lower */
    { { { "/proc/self/cgroup", "0::/pod/app\n" },
        { "/sys/fs/cgroup/pod/app/cpu.max", "400000 100000\n" },
        { "/sys/fs/cgroup/pod/cpu.max", "300000 100000\n" },
        { "/sys/fs/cgroup/pod/memory.max", "4096\n" } },
      4096,
      3 },
    /* version 1: controllers in any order, in a group of the host that the container does not see */
    { { { "/proc/self/cgroup", "12:cpuset:/\n4:cpuacct,cpu:/docker/1f\n3:memory:/docker/1f\n" },
        { "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n" },
        { "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "50000\n" },
        { "/sys/fs/cgroup/memory/memory.limit_in_bytes", "8192\n" } },
      8192,
      5 },
    { { { "/proc/self/cgroup", "4:cpu:/a\n" },
        { "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n" },
        { "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n" } },
      0,
      0 },
    /* both versions: controllers are in one of them; cpuset is not cpu */
    { { { "/proc/self/cgroup", "5:cpuset:/z\n4:cpu:/a\n1:name=systemd:/b\n0::/b\n" },
        { "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000\n" },
        { "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n" },
        { "/sys/fs/cgroup/cpu/z/cpu.cfs_quota_us", "1\n" } },
      0,
      1 },
    { { { "/proc/self/cgroup", "no colon\n" } }, 0, 0 },
};

TEST(limits_of_control_groups_are_read) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char folder[] = "/tmp/test-system-XXXXXX";
        assert_non_null(mkdtemp(folder));
        assert_int_equal(chdir(folder), 0);
        for (const system_file *f = cases[i].files; f < cases[i].files + 5 && f->path; f++) put(f->path, f->text);
        const uint64_t memory = moe_group_limit(&moe_group_memory), quota = moe_group_limit(&moe_group_processors);
        if (memory != (cases[i].memory ? cases[i].memory : UINT64_MAX) ||
            quota != (cases[i].processors ? cases[i].processors : UINT64_MAX))
            fail_msg("case %zu: %llu bytes, %llu processors", i, (unsigned long long)memory, (unsigned long long)quota);
        if (cases[i].processors) assert_true((uint64_t)moe_processors() <= cases[i].processors);
        assert_true(moe_processors() >= 1);
        assert_int_equal(chdir("/"), 0);
        char command[64];
        snprintf(command, sizeof command, "rm -r %s", folder);
        assert_int_equal(system(command), 0);
    }
}

int main(void) { return run_all_tests(NULL, NULL); }
