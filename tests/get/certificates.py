"""TLS certificates for services.py: NAME.pem and NAME.key in folder(), made by the openssl program."""
import functools
import os
import subprocess
import tempfile

OURS = "DNS:localhost,IP:127.0.0.1"
CERTIFICATES = {  # name: (authority, names, begin, end)
    "good": ("ours", OURS, "20200101", "20991231"), "host": ("ours", "DNS:other.example", "20200101", "20991231"),
    "expired": ("ours", OURS, "20200101", "20200201"), "early": ("ours", OURS, "20980101", "20991231"),
    "unknown": ("theirs", OURS, "20200101", "20991231")}
OPENSSL = """[req]
distinguished_name = names
x509_extensions = authority
[names]
commonName = supplied
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = CA:FALSE
authorityKeyIdentifier = keyid
[ca]
default_ca = signer
[signer]
database = index.txt
new_certs_dir = .
rand_serial = yes
unique_subject = no
default_md = sha256
policy = names
copy_extensions = copy
x509_extensions = leaf
"""


@functools.cache
def made():
    """Create two authorities and the certificates with the openssl program; return the temporary folder."""
    holder = tempfile.TemporaryDirectory()

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=holder.name, check=True, capture_output=True, timeout=60)
    for name, text in ("openssl.cnf", OPENSSL), ("index.txt", ""):
        with open(os.path.join(holder.name, name), "w", encoding="ascii") as file:
            file.write(text)
    new = ["-config", "openssl.cnf", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in "ours", "theirs":
        openssl("req", "-x509", *new, "-days", "30000", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.pem")
    for name, (authority, hosts, begin, end) in CERTIFICATES.items():
        openssl("req", "-new", *new, "-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}", "-keyout",
                f"{name}.key", "-out", f"{name}.csr")
        openssl("ca", "-batch", "-config", "openssl.cnf", "-cert", f"{authority}.pem", "-keyfile", f"{authority}.key",
                "-startdate", begin + "000000Z", "-enddate", end + "000000Z", "-notext", "-in", f"{name}.csr",
                "-out", f"{name}.pem")
    return holder


def folder():
    return made().name


def authority(name="ours"):
    """Return the path of an authority's certificate."""
    return os.path.join(folder(), name + ".pem")
