// What is declared between these is C, whichever language includes it.
#ifndef CF_EXTERN_C_H
#define CF_EXTERN_C_H

#ifdef __cplusplus
#define CF_EXTERN_C_BEGIN extern "C" {
#define CF_EXTERN_C_END   }
#else
#define CF_EXTERN_C_BEGIN
#define CF_EXTERN_C_END
#endif

#endif
