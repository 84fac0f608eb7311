//! Freed chunk buffers go back to the system at once: else memory is not bounded by what is counted.
//!
//! The GNU allocator serves large buffers by mappings of their own at first, and from its heaps as soon as one
//! of them was freed. There, buffers of 4 MiB and of 110 KB leave holes: with `memory.max` = 128 MiB, which bounds all
//! buffers alive (I6), the process held 286 MiB under load; with a fixed threshold it holds 166, tables and a
//! thousand connections included. jemalloc (273) and mimalloc (454) did not help with
//! their defaults. The price is a page fault for each fresh page of a buffer; what is read from disk is read into
//! buffers that were used before (`fletch_store`, `buffers`).
//!
//! This file is the only one of the server with `unsafe`.

/// Buffers from this size on are mappings of their own, bytes: most samples are smaller chunks than the usual
/// slice, and larger than this.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_FROM: libc::c_int = 64 << 10;

/// Fixes the threshold. To be called first of all.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the only way to tell the C library's allocator")]
pub fn set_up() {
    // SAFETY: `mallopt` takes two integers and changes a parameter of the allocator; it is called
    // before there is another thread.
    if unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM) } != 1 {
        eprintln!("fletch-server: the allocator keeps its own threshold; memory may exceed memory.max");
    }
}

/// Nothing to do: other C libraries give large buffers back.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn set_up() {}
