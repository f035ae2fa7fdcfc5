"""Makes a region in another folder that equals the region in the first: `python -m redteam.move FROM TO`."""

import sys
from pathlib import Path

from vgpu.native import Region

if __name__ == "__main__":
    with Region.open(Path(sys.argv[1])) as region:
        Region.create(Path(sys.argv[2]), region.limits()).close()
