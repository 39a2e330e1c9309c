/* A file's instruction set, whatever the build flags: one binary has all variants and selects at run time. */
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif
