//! Freed buffers go back to the system at once: else memory is not bounded by what is counted.
//!
//! The GNU allocator serves large buffers by mappings of their own at first, and from its heaps as soon as one
//! of them was freed. There, buffers of mixed sizes leave holes: a server with `memory.max` = 128 MiB, which bounds all
//! buffers alive (I6), held 286 MiB under load; with a threshold of 64 KiB it holds 166, tables and a
//! thousand connections included. jemalloc (273) and mimalloc (454) did not help with
//! their defaults. A mount that walked 1.28 million names held 158 to 218 MB, where 64 MiB of tables are kept; with
//! 64 KiB 95 MB, with 1 MiB 113 to 120.
//!
//! The price is a page fault for each fresh page of a buffer: a mount that reads files of 110 KB takes 1.7 CPU seconds
//! for a GB with 64 KiB and 1.2 with 1 MiB, as without. What is read from disk is read into buffers that
//! were used before (`buffers`). Hence each program's own threshold.
//!
//! This file is the only one of the two programs with `unsafe`.

/// For a process whose buffers are mostly chunks: most samples are smaller chunks than the usual slice, and
/// larger than this. Bytes.
pub const CHUNKS: u32 = 64 << 10;
/// For a process whose long buffers are mostly tables and whole slices. Bytes.
pub const TABLES: u32 = 1 << 20;

/// BufferPool of `bytes` and more are mappings of their own from now on. To be called first of all, before there is
/// another thread. Whether the allocator takes it: if not, memory may exceed its limit.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the only way to tell the C library's allocator")]
#[must_use]
pub fn map_from(bytes: u32) -> bool {
    let Ok(bytes) = libc::c_int::try_from(bytes) else { return false };
    // SAFETY: `mallopt` takes two integers and changes a parameter of the allocator; it is called
    // before there is another thread.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, bytes) == 1 }
}

/// Nothing to do: other C libraries give large buffers back.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
#[must_use]
pub fn map_from(_bytes: u32) -> bool {
    true
}
