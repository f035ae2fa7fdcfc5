/* A library whose only feature is its name, which it is linked with: that under which another one is to be preloaded.
 */
extern const int namesake;
const int namesake = 1;
