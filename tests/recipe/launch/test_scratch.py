"""What a run removes from the machine's shared memory when it ends, beside other processes of the same user."""

import multiprocessing
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from recipe.launch.scratch import _remove_shared_memory, _shared_memory_files


def acquire(semaphore):
    """In a process that is spawned, which opens it by its name."""
    assert semaphore.acquire(timeout=10)


def test_only_what_no_process_has_mapped_is_removed():
    before = set(_shared_memory_files())
    left_behind = Path(f"/dev/shm/psm_left_{time.time_ns()}")
    left_behind.write_text("of a process that was killed")
    shared = SharedMemory(create=True, size=16)
    spawning = multiprocessing.get_context("spawn")
    semaphore = spawning.Semaphore(1)
    # Files of other tests beside this one are taken for some that were there before.
    own = {str(left_behind), f"/dev/shm/{shared.name}", f"/dev/shm/sem.{semaphore._semlock.name.strip('/')}"}
    assert own <= set(_shared_memory_files()) - before
    _remove_shared_memory(set(_shared_memory_files()) - own, time.time() + 1)
    assert own & set(_shared_memory_files()) == own - {str(left_behind)}
    process = spawning.Process(target=acquire, args=(semaphore,))
    process.start()
    process.join()
    shared.close()
    shared.unlink()
    assert process.exitcode == 0
