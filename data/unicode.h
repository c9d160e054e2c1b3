// UTF-8, and which characters are letters, numbers and blanks, as GPT-2's encoding asks (its pattern's \p{L}, \p{N} and \s).
#ifndef UNICODE_H
#define UNICODE_H

// Bytes of the character that begins there; 0: it is no valid UTF-8 (overlong, a surrogate, past U+10FFFF, cut short). A zero
// follows the text.
int unicode_bytes(const char *at);

typedef enum { UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_BLANK } unicode_class;
unicode_class unicode_class_of(const char *at); // of a valid character

#endif
