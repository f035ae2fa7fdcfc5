/* The tables behind cuGetExportTable that have files of their own, or that others hash. */
#ifndef VGPU_SIMULATOR_EXPORT_TABLES_H
#define VGPU_SIMULATOR_EXPORT_TABLES_H

extern const void *const runtime_table[13]; /* export_tables.c */
extern const void *const storage_table[4];  /* storage.c */
/* runtime_check/runtime_check.c; NULL where it is not compiled in: in every wheel and image. */
extern const void *const runtime_check_table[3] __attribute__((weak, visibility("hidden")));

#endif
