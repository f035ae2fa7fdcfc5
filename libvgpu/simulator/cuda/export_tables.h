/* The tables behind cuGetExportTable that have files of their own, or that others hash. */
#ifndef VGPU_SIMULATOR_EXPORT_TABLES_H
#define VGPU_SIMULATOR_EXPORT_TABLES_H

extern const void *const runtime_table[13]; /* export_tables.c */
extern const void *const storage_table[4];  /* storage.c */
#ifdef SIM_RUNTIME_CHECK
extern const void *const runtime_check_table[3]; /* runtime_check/runtime_check.c, which no wheel and no image has */
#endif

#endif
