// Translate standard input line by line. Print each line as NUMBER TAB TRANSLATION as soon as it is translated.
#include <moetext.h>

#include <iostream>
#include <list>
#include <memory>
#include <stdexcept>
#include <string>

struct line {
    int number;
    std::string text;
};

static int pull(void *user, int, moetext_request *request) {
    auto &lines = *static_cast<std::list<line> *>(user);
    std::string text;
    if (!std::getline(std::cin, text)) return MOE_PULL_END;
    lines.push_back({ lines.empty() ? 1 : lines.back().number + 1, std::move(text) });
    request->text = lines.back().text.data();
    request->length = lines.back().text.size();
    request->user = &lines.back();
    return MOE_PULL_REQUEST;
}

static void done(void *, const moetext_result *result) {
    const auto *from = static_cast<const line *>(result->user);
    if (result->status) std::cerr << "line " << from->number << ": " << result->message << '\n';
    else std::cout << from->number << '\t' << result->hypotheses[0].text << std::endl;
}

int main(int argc, char **argv) try {
    moe_error e;
    const auto check = [&e](moe_status status) {
        if (status) throw std::runtime_error(e.message);
    };
    moetext_model *model = nullptr;
    moetext *translator = nullptr;
    check(moetext_model_open(nullptr, nullptr, &model, &e));
    std::unique_ptr<moetext_model, decltype(&moetext_model_close)> model_owner(model, moetext_model_close);
    check(moetext_new(model, argc > 1 ? argv[1] : "target=de", &translator, &e));
    std::unique_ptr<moetext, decltype(&moetext_free)> owner(translator, moetext_free);
    std::list<line> lines;
    check(moetext_translate(translator, pull, done, &lines, &e));
} catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 1;
}
