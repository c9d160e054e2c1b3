// See prompt.h.
#include "prompt.h"
#include "../input.h"
#include <stdlib.h>
#include <string.h>

int32_t *prompt_encode(const options *opt, const vocabulary *v, int64_t V, int64_t *count) {
    problem why;
    const bool file = *opt->prompt == '@';
    int64_t bytes = *opt->prompt ? (int64_t)strlen(opt->prompt) : 1, at = 0, end_of = vocabulary_end_of_text(v);
    char *text = file ? input_read_all("--prompt", opt->prompt + 1, PROMPT_MAX_BYTES, &bytes, &why) : strdup(opt->prompt);
    if (!text && file) cf_die_together(problem_hint(&why, "every rank must be able to read it"), "%s", why.what);
    if (!text) cf_die(NULL, "out of memory for the prompt");
    if (bytes > PROMPT_MAX_BYTES)
        cf_die_together("give a shorter one", "--prompt has %ld bytes, more than the %d that it may have", bytes, PROMPT_MAX_BYTES);
    int32_t *tokens = cf_host_alloc(bytes + opt->sample_tokens, sizeof *tokens, "a sample");
    if (!*opt->prompt) {
        *count = 1;
        tokens[0] = end_of >= 0 && end_of < V ? (int32_t)end_of : V > '\n' ? '\n' : 0;
        free(text);
        return tokens;
    }
    if (!v && V > vocabulary_size(NULL))
        cf_die_together("data/prepare.py --encoding gpt2 writes one beside the tokens; name them with --train or --val",
                        "--prompt: there is no tokenizer.bin for the model's %ld words beside --train, --val or --init-from", V);
    while (v && at < bytes && cf_utf8_bytes(text + at)) at += cf_utf8_bytes(text + at);
    if (v && at < bytes)
        cf_die_together("convert it with iconv", "--prompt is not UTF-8: byte %ld is 0x%02x", at, (unsigned char)text[at]);
    *count = vocabulary_encode(v, text, bytes, tokens);
    free(text);
    if (*count < 1 || *count > opt->seq)
        cf_die_together("give another one, or raise --seq", "--prompt has %ld tokens; allowed is 1 to --seq %ld", *count, opt->seq);
    for (int64_t i = 0; i < *count; i++)
        if (tokens[i] >= V)
            cf_die_together("give another one, or the model's tokenizer.bin",
                            "--prompt: its token %ld is %d, but the model has %ld words", i, tokens[i], V);
    return tokens;
}
