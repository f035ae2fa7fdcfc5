/* Numbered points between the stores of an operation, at which a test build (-DVGPU_DEATH_POINTS) can end the process
 * as kill -9 would. */
#ifndef VGPU_DEATH_H
#define VGPU_DEATH_H
#ifdef VGPU_DEATH_POINTS
void vgpu_death_point(void); /* provided by the test */
#define DEATH_POINT() vgpu_death_point()
#else
#define DEATH_POINT() ((void)0)
#endif
#endif
