// Text from elsewhere (files, other ranks, strangers) as it may be printed: a terminal obeys control characters. Whatever
// goes through cf_die() or a problem has been through this.
#ifndef CF_PRINTABLE_H
#define CF_PRINTABLE_H

// Bytes of the character that begins there; 0: it is no UTF-8, or C0 but a line's end and a tab, DEL or C1.
static inline int cf_printable_bytes(const unsigned char *at) {
    int bytes = *at < 0x80 ? 1 : *at < 0xc2 ? 0 : *at < 0xe0 ? 2 : *at < 0xf0 ? 3 : *at < 0xf5 ? 4 : 0;
    if (bytes == 1 && ((*at < ' ' && *at != '\n' && *at != '\t') || *at == 0x7f)) return 0;
    if (*at == 0xc2 && at[1] < 0xa0) return 0;
    for (int i = 1; i < bytes; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    return bytes;
}

// Puts '?' for every byte of what may not be printed, and returns the text.
static inline char *cf_printable(char *text) {
    for (char *at = text; *at;) {
        int bytes = cf_printable_bytes((const unsigned char *)at);
        if (!bytes) *at = '?';
        at += bytes ? bytes : 1;
    }
    return text;
}

#endif
