//! Memory that holds the kernel's requests until they are answered, and that outlives the process.
//!
//! A kernel before Linux 6.9 does not send a request again. There a worker reads each request into this
//! memory, which its keeper has, too. When the worker dies, the keeper finds there what was not answered, and
//! has the next worker answer it.
//!
//! ```text
//! slots used │ the tag of each slot's mount │ slots of 8 KiB, as the kernel fills them
//! ```
//!
//! 1. A request is in its slot from the moment when the kernel gives it out until its reply is written. It
//!    may be answered twice then: the kernel refuses a second reply.
//! 2. A slot is free while its first four bytes, the length of a request, are 0.
//! 3. Each worker has a memory of its own, and nobody else writes to it.
//! 4. The kernel copies a request to pages that are there. If a process is killed while the kernel waits for
//!    a page, the program that asked gets EIO.

use crate::fuse_wire::{IN_HEADER_BYTES, u32_at};
use memmap2::{MmapOptions, MmapRaw};
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    uio::pread,
};
use parking_lot::Mutex;
use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
    time::Duration,
};

/// The longest request, and the shortest buffer that the kernel fills. It needs a `max_write` of 4 KiB.
const SLOT_BYTES: usize = 8192;
/// The most requests in flight in one process. Only slots that were used have memory.
const SLOTS: usize = 16_384;
const TAGS_AT: usize = 4096;
const SLOTS_AT: usize = TAGS_AT + SLOTS * size_of::<u64>();
const LENGTH_BYTES: usize = 4;
/// The pause of a thread that finds all slots full.
const FULL_PAUSE: Duration = Duration::from_millis(1);

/// The memory of this process.
#[derive(Debug)]
pub struct RequestMemory {
    descriptor: OwnedFd,
    map: MmapRaw,
    free: Mutex<FreeSlots>,
}

#[derive(Debug, Default)]
struct FreeSlots {
    returned: Vec<usize>,
    /// The slots below this number were used.
    used: usize,
}

/// A place for one request. Dropped, it is free again: its request is answered then.
#[derive(Debug)]
pub struct Slot {
    memory: Arc<RequestMemory>,
    number: usize,
}

impl RequestMemory {
    /// Returns a memory without requests.
    ///
    /// # Errors
    /// The error of the system.
    pub fn new() -> io::Result<Arc<Self>> {
        let file = File::from(memfd_create("fletch-requests", MFdFlags::MFD_CLOEXEC)?);
        let bytes = SLOTS_AT + SLOTS * SLOT_BYTES;
        file.set_len(bytes as u64)?;
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        Ok(Arc::new(RequestMemory { descriptor: file.into(), map, free: Mutex::default() }))
    }

    /// Returns the descriptor by which the keeper reads the memory.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns a free slot for a request of the mount with this tag. Waits while there is none.
    #[must_use]
    pub fn take(self: &Arc<Self>, tag: u64) -> Slot {
        let number = loop {
            let mut free = self.free.lock();
            if let Some(number) = free.returned.pop() {
                break number;
            }
            if free.used < SLOTS {
                free.used += 1;
                self.write(0, &(free.used as u64).to_ne_bytes());
                break free.used - 1;
            }
            drop(free);
            thread::sleep(FULL_PAUSE);
        };
        self.write(TAGS_AT + number * size_of::<u64>(), &tag.to_ne_bytes());
        let mut slot = Slot { memory: Arc::clone(self), number };
        slot.bytes()[..LENGTH_BYTES].fill(0);
        slot
    }

    #[expect(
        unsafe_code,
        reason = "one slot, or the words before the slots, which have one writer at a time"
    )]
    fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the range lies before the slots in the map. The list of free slots is locked, or the slot
        // of this tag is taken, so nobody else writes here, and nobody reads here but other processes.
        unsafe { self.map.as_mut_ptr().add(at).copy_from(bytes.as_ptr(), bytes.len()) }
    }
}

impl Slot {
    /// Returns the place for the request.
    #[expect(unsafe_code, reason = "a slot has one owner")]
    pub fn bytes(&mut self) -> &mut [u8] {
        let at = SLOTS_AT + self.number * SLOT_BYTES;
        // SAFETY: the range is one slot of the map, which lives as long as `self.memory`. Its number was
        // given to this value alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.map.as_mut_ptr().add(at), SLOT_BYTES) }
    }

    /// Puts a request here that a dead process had. A request that is too long is not kept.
    pub fn fill(&mut self, message: &[u8]) {
        if let Some(place) = self.bytes().get_mut(..message.len()) {
            place[LENGTH_BYTES..].copy_from_slice(&message[LENGTH_BYTES..]);
            place[..LENGTH_BYTES].copy_from_slice(&message[..LENGTH_BYTES]);
        }
    }

    /// Leaves the request, which this process does not answer, to the next process.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bytes()[..LENGTH_BYTES].fill(0);
        self.memory.free.lock().returned.push(self.number);
    }
}

/// Returns the requests in a memory, with the tags of their mounts. One that the kernel is just then copying
/// is not whole, if the process still has a thread.
///
/// # Errors
/// This is no such memory.
pub fn requests_in(memory: &OwnedFd) -> io::Result<Vec<(u64, Vec<u8>)>> {
    let number_at = |at: usize| {
        let mut number = [0; size_of::<u64>()];
        pread(memory, &mut number, i64::try_from(at).unwrap_or(i64::MAX))?;
        Ok::<_, io::Error>(u64::from_ne_bytes(number))
    };
    let used = usize::try_from(number_at(0)?).unwrap_or(SLOTS).min(SLOTS);
    let mut found = Vec::new();
    for number in 0..used {
        let mut message = vec![0; SLOT_BYTES];
        let at = SLOTS_AT + number * SLOT_BYTES;
        let read = pread(memory, &mut message, i64::try_from(at).unwrap_or(i64::MAX))?;
        let len = u32_at(&message[..read], 0).map_or(0, |len| len as usize);
        if (IN_HEADER_BYTES..=read).contains(&len) {
            message.truncate(len);
            found.push((number_at(TAGS_AT + number * size_of::<u64>())?, message));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(len: u32, byte: u8) -> Vec<u8> {
        let mut message = vec![byte; len as usize];
        message[..4].copy_from_slice(&len.to_ne_bytes());
        message
    }

    #[test]
    fn a_request_is_there_until_it_is_answered() {
        let memory = RequestMemory::new().expect("a memory");
        let other = memory.descriptor().try_clone_to_owned().expect("another descriptor");
        let found = || requests_in(&other).expect("a memory");
        let (mut first, mut second) = (memory.take(7), memory.take(8));
        assert_eq!(found(), [], "nothing was asked yet");
        first.fill(&message(40, 1));
        second.fill(&message(296, 2));
        assert_eq!(found(), [(7, message(40, 1)), (8, message(296, 2))]);
        drop(first);
        assert_eq!(found(), [(8, message(296, 2))]);
        // The next request gets the same place, and the tag of its own mount.
        let mut third = memory.take(9);
        assert_eq!(found(), [(8, message(296, 2))]);
        third.fill(&message(48, 3));
        assert_eq!(found(), [(9, message(48, 3)), (8, message(296, 2))]);
        second.leave();
        drop((third, memory));
        assert_eq!(found(), [(8, message(296, 2))], "the memory outlives its process");
    }

    #[test]
    fn what_is_no_request_is_passed_over() {
        let memory = RequestMemory::new().expect("a memory");
        let mut slots = [memory.take(1), memory.take(1), memory.take(1)];
        slots[0].bytes()[..4].copy_from_slice(&39u32.to_ne_bytes());
        slots[1].bytes()[..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        slots[2].fill(&vec![1; SLOT_BYTES + 1]);
        let file = memory.descriptor().try_clone_to_owned().expect("another descriptor");
        assert_eq!(requests_in(&file).expect("a memory"), []);
        let empty = File::from(memfd_create("empty", MFdFlags::MFD_CLOEXEC).expect("a file"));
        assert_eq!(requests_in(&empty.into()).expect("an empty file"), []);
    }
}
