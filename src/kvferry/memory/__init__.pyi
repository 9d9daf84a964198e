from kvferry.memory.address_space import (
    AddressSpace as AddressSpace,
    guard as guard,
    region_over as region_over,
)
from kvferry.memory.copies import StagedImages as StagedImages, StagingCopies as StagingCopies
from kvferry.memory.copy_kernel import KERNEL as KERNEL, WHY_NO_KERNEL as WHY_NO_KERNEL
from kvferry.memory.device_stream import enter_stream as enter_stream, finish_stream as finish_stream
from kvferry.memory.pool_cells import PoolCells as PoolCells
from kvferry.memory.shared_memory import (
    available_memory as available_memory,
    read_kernel_file as read_kernel_file,
    sealed_file as sealed_file,
)
