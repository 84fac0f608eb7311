//! What a keeper finds in the memory of a worker ([`crate::request_memory`]).

use crate::fuse_wire::{UNIQUE_AT, u64_at};
use crate::request_memory::requests_in;
use std::{collections::HashMap, os::fd::OwnedFd};

/// A request that its worker did not answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unanswered {
    /// The tag of its mount.
    pub tag: u64,
    /// Its number.
    pub unique: u64,
    pub message: Vec<u8>,
}

/// The memory in which a worker has its requests.
pub(super) struct WorkerMemory {
    descriptor: OwnedFd,
    /// Whether the worker is dead or silent.
    pub is_left: bool,
    /// The requests that were found there, by tag and number, and whether they were returned.
    found: HashMap<(u64, u64), (Vec<u8>, bool)>,
}

impl WorkerMemory {
    pub fn new(descriptor: OwnedFd) -> Self {
        WorkerMemory { descriptor, is_left: false, found: HashMap::new() }
    }

    /// Returns each request once.
    ///
    /// The kernel may still copy a request for a thread that is not gone. So unless all threads are gone, a
    /// request counts when it is found for the second time, and looks as the first time.
    pub fn take(&mut self, is_gone: bool) -> Vec<Unanswered> {
        let found = requests_in(&self.descriptor).unwrap_or_else(|error| {
            tracing::error!(%error, "the requests of a dead process are lost");
            Vec::new()
        });
        let mut new = Vec::new();
        for (tag, message) in found {
            let Some(unique) = u64_at(&message, UNIQUE_AT) else { continue };
            let (before, is_taken) = self.found.entry((tag, unique)).or_default();
            if !*is_taken && (is_gone || *before == message) {
                *is_taken = true;
                new.push(Unanswered { tag, unique, message: message.clone() });
            }
            *before = message;
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_memory::RequestMemory;

    /// A request of 40 bytes with this number.
    fn message(unique: u64, rest: u8) -> Vec<u8> {
        let mut message = vec![rest; 40];
        message[..4].copy_from_slice(&40u32.to_ne_bytes());
        message[UNIQUE_AT..UNIQUE_AT + 8].copy_from_slice(&unique.to_ne_bytes());
        message
    }

    #[test]
    fn a_request_that_is_being_copied_does_not_count() {
        let memory = RequestMemory::new().expect("a memory");
        let descriptor = memory.descriptor().try_clone_to_owned().expect("another descriptor");
        let mut of_worker = WorkerMemory::new(descriptor);
        let mut slots = [memory.take(7), memory.take(7)];
        slots[0].fill(&message(2, 0));
        slots[1].fill(&message(4, 0));
        assert_eq!(of_worker.take(false), []);
        // The kernel had not copied all of the second one.
        slots[1].fill(&message(4, 1));
        let unanswered = |unique, rest| Unanswered { tag: 7, unique, message: message(unique, rest) };
        assert_eq!(of_worker.take(false), [unanswered(2, 0)]);
        assert_eq!(of_worker.take(false), [unanswered(4, 1)]);
        // A thread reads one more, and is gone.
        let mut last = memory.take(7);
        last.fill(&message(6, 0));
        assert_eq!(of_worker.take(true), [unanswered(6, 0)], "each once");
    }
}
