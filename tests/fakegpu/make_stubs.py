"""Write the C source of a stub for each NVIDIA function that torch needs and the fakes lack.

Usage: make_stubs.py TORCH_LIB_FOLDER cuda.o nccl.o > stubs.c

A stub does nothing and returns 0, which all of these libraries read as success. With FAKE_STUBS
set it prints its name.
"""

import re
import subprocess
import sys
from pathlib import Path

# torch looks these up by name while it runs, so `nm` does not list them.
LOOKED_UP = """
cuCtxFromGreenCtx cuCtxPopCurrent cuCtxPushCurrent cuDevResourceGenerateDesc
cuDevSmResourceSplitByCount cuDeviceGetDevResource cuGreenCtxCreate cuGreenCtxDestroy
cuGreenCtxStreamCreate cuMemAddressFree cuMemAddressReserve cuMemCreate
cuMemExportToShareableHandle cuMemGetAddressRange cuMemGetAllocationGranularity
cuMemGetAllocationPropertiesFromHandle cuMemImportFromShareableHandle cuMemMap cuMemRelease
cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap cuMulticastAddDevice cuMulticastBindMem
cuMulticastCreate cuMulticastUnbind
nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetGpuFabricInfoV
nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetNvLinkRemoteDeviceType
nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlInit_v2 nvmlSystemGetCudaDriverVersion_v2
"""
LOOKED_UP = set(re.findall(r"\w+", LOOKED_UP))

HEADER = """\
#include <stdio.h>
#include <stdlib.h>

static long stub(const char *name)
{
    if (getenv("FAKE_STUBS"))
        fprintf(stderr, "[stub] %s\\n", name);
    return 0;
}

#define STUB(name) \\
    __attribute__((visibility("default"))) long name(void) { return stub(#name); }

"""


def symbols(option, files, *more):
    """Return the names that `nm` lists for the files, without their versions."""
    command = ["nm", *more, option, *map(str, files)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line and line[-1] != ":"}


folder, *fakes = map(Path, sys.argv[1:])
libraries = sorted(folder.glob("*.so*"))
missing = symbols("--undefined-only", libraries, "-D") - symbols("--defined-only", libraries, "-D")
missing = {name for name in missing if re.match("_*(cu|nccl|nv)", name)}
stubs = (missing | LOOKED_UP) - symbols("--defined-only", fakes)
print(HEADER + "\n".join(f"STUB({name})" for name in sorted(stubs)))
