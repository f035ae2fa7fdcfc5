/* The tables of cuGetExportTable that have files of their own, or that other code hashes. */
#ifndef VGPU_SIMULATOR_EXPORT_TABLES_H
#define VGPU_SIMULATOR_EXPORT_TABLES_H

extern const void *const runtime_table[13]; /* export_tables.c */
extern const void *const storage_table[4];  /* storage.c */
/* runtime_check/runtime_check.c; NULL if it is not compiled in, as in every wheel and image. */
extern const void *const runtime_check_table[3] __attribute__((weak, visibility("hidden")));

#endif
