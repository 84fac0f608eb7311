//! The threshold of the C library's allocator, from which it returns freed buffers to the system at once.
//!
//! Without it, process memory is not bounded by the memory that the store counts. The GNU allocator maps
//! large buffers one by one at first, and serves them from its heaps as soon as one of them was freed.
//! Buffers of mixed sizes leave holes in a heap.
//!
//! Measured: a server with `memory.max` = 128 MiB, which bounds all live buffers (I6), held 286 MiB under
//! load. With a threshold of 64 KiB it holds 166 MiB, tables and a thousand connections included. jemalloc
//! (273) and mimalloc (454) did not help with their defaults. A mount that walked 1.28 million names held 158
//! to 218 MB, of which 64 MiB are tables; with 64 KiB it holds 95 MB, with 1 MiB 113 to 120 MB.
//!
//! The price is a page fault for each fresh page of a buffer. A mount that reads files of 110 KB takes 1.7
//! CPU seconds for a GB with 64 KiB, and 1.2 with 1 MiB or no threshold. Reads of the disk use pooled buffers
//! (`buffer_pool`). So each program sets its own threshold.
//!
//! Short buffers stay in the heaps, one heap a thread, and a heap shrinks only at its end. A server that had
//! worked out ten million samples held 68 MiB; it holds 30 MiB after [`release_freed`].
//!
//! This file is the only one of the two programs with `unsafe`.

/// Threshold for a process whose buffers are mostly chunks, in bytes.
///
/// Most samples are chunks shorter than the usual slice, and longer than this.
pub const CHUNKS: u32 = 64 << 10;
/// Threshold for a process whose long buffers are mostly tables and whole slices, in bytes.
pub const TABLES: u32 = 1 << 20;

/// By how much a heap grows at once, in bytes. The default of 128 KiB is for the first heap only: those of
/// other threads grow by a page or a few, with a system call each time.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const GROWS_BY: libc::c_int = 256 << 10;

/// Maps every buffer of at least `bytes` on its own from now on.
///
/// Call it before the process has a second thread. Returns whether the allocator took it; if it did not,
/// memory may exceed its limit.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the only way to tell the C library's allocator")]
#[must_use]
pub fn map_from(bytes: u32) -> bool {
    let Ok(bytes) = libc::c_int::try_from(bytes) else { return false };
    // SAFETY: `mallopt` takes two integers and changes a parameter of the allocator; it is called before
    // there is another thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes) == 1 && libc::mallopt(libc::M_TOP_PAD, GROWS_BY) == 1
    }
}

/// Gives the freed pages of all heaps back to the system. Blocks for some milliseconds.
///
/// Call it after work that allocated much and will not soon be done again.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the only way to tell the C library's allocator")]
pub fn release_freed() {
    // SAFETY: `malloc_trim` locks each heap while it looks for free pages, and moves no buffer.
    unsafe { libc::malloc_trim(0) };
}

/// Does nothing: other C libraries give freed pages back.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn release_freed() {}

/// Does nothing: other C libraries give large buffers back.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
#[must_use]
pub fn map_from(_bytes: u32) -> bool {
    true
}
