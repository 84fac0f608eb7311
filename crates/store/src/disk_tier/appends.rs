//! Appends: how chunks get to the disk behind the back of their readers.
//!
//! Invariants:
//! 1. one thread at most appends, and it ends when the queue is empty;
//! 2. the first chunk of a group waits for others for [`GROUP_WAIT`] at most, and not at all while somebody
//!    waits until a chunk was appended. Else a warm-up, which waits for each of its chunks, would take
//!    several times as long;
//! 3. a chunk counts as queued until its write ended, however that happens.

use super::{DiskTier, append_queue::Append};
use crate::{
    dataset_id::DatasetId,
    disk::{DiskEngine, Newcomer, Stored},
    stats::Counters,
};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{StoreKey, Verified};
use std::{sync::Arc, time::Duration};
use tokio::{
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

/// How long the first chunk of a group waits for others.
const GROUP_WAIT: Duration = Duration::from_millis(5);
/// Time between two looks at a full append queue.
const QUEUE_POLL_EVERY: Duration = Duration::from_millis(5);
/// How long the removal of a chunk waits for its append.
const APPENDED_WITHIN: Duration = Duration::from_secs(2);

impl DiskTier {
    /// Queues the chunk for an append, and returns whether it will be kept.
    ///
    /// `false` when the tier does not admit it or the queue is full.
    pub(crate) fn enqueue(self: &Arc<Self>, key: &StoreKey, dataset: DatasetId, chunk: &Verified) -> bool {
        if dataset == DatasetId::UNCACHED {
            return false;
        }
        let (Some(engine), Ok(len)) = (self.engine(), u32::try_from(chunk.bytes().len())) else {
            return false;
        };
        match engine.length(key) {
            Some(there) if there == len => return true,
            // The chunk was just hashed, so the bytes on disk are wrong.
            Some(_) => engine.quarantine(key),
            None => {}
        }
        if self.queue.lock().get(key).is_some() {
            return true;
        }
        // The dataset is charged now, so that whatever is queued is also written.
        let reserved = match engine.reserve_share(key, dataset, len) {
            Ok(reserved) => reserved,
            Err(Stored::Yes | Stored::Already) => return true,
            Err(Stored::Refused(_)) => {
                self.note_refused(dataset, len);
                return false;
            }
        };
        let mut queue = self.queue.lock();
        if queue.bytes() + u64::from(len) > self.queue_bytes {
            Counters::add(&self.counters.append_drops, 1);
            Counters::add(&self.counters.append_dropped_bytes, u64::from(len));
            return false;
        }
        let (key, chunk) = (key.clone(), chunk.clone());
        queue.push(Append { key, dataset, chunk, reserved: Some(reserved) });
        if queue.is_due() {
            self.due.notify_one();
        }
        if !std::mem::replace(&mut queue.has_drainer, true) {
            let disk = Arc::clone(self);
            drop(spawn_blocking(move || disk.drain()));
        }
        true
    }

    /// Appends queued chunks until the queue is empty.
    fn drain(&self) {
        /// Lets the next call of `enqueue` start a drainer, also after a panic.
        struct DrainerGuard<'a>(&'a DiskTier);
        impl Drop for DrainerGuard<'_> {
            fn drop(&mut self) {
                self.0.queue.lock().has_drainer = false;
            }
        }
        loop {
            let permit = DrainerGuard(self);
            while let Some(mut group) = self.next_group() {
                group.write();
            }
            drop(permit);
            self.emptied.notify_waiters();
            // A chunk may have been queued between the last look and the guard's end.
            let mut queue = self.queue.lock();
            if queue.is_empty() || std::mem::replace(&mut queue.has_drainer, true) {
                return;
            }
        }
    }

    /// Returns the next appends, after a moment in which others may come. `None` when the queue is empty.
    fn next_group(&self) -> Option<Group<'_>> {
        let mut queue = self.queue.lock();
        if queue.is_empty() {
            return None;
        }
        // Due, or after the moment: the group is what there is.
        self.due.wait_while_for(&mut queue, |queue| !queue.is_due(), GROUP_WAIT);
        Some(Group { disk: self, appends: queue.next_group() })
    }

    /// While the guard lives, the next group does not wait for further chunks.
    fn waiter(&self) -> Waiter<'_> {
        self.queue.lock().waiters += 1;
        self.due.notify_one();
        Waiter(self)
    }

    /// Waits until the chunk is not queued for an append, at most until `until`.
    pub(crate) async fn wait_appended(&self, key: &StoreKey, until: Instant) {
        let _waiter = self.waiter();
        loop {
            let changed = self.promises.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.queue.lock().get(key).is_none() || timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the append queue is empty, at most for `within`.
    pub async fn wait_flushed(&self, within: Duration) {
        let _waiter = self.waiter();
        let until = Instant::now() + within;
        loop {
            let emptied = self.emptied.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            if self.queue.lock().bytes() == 0 || timeout_at(until, emptied).await.is_err() {
                return;
            }
        }
    }

    /// Waits until `len` more bytes fit into half of the append queue, at most for `within`.
    pub(crate) async fn wait_for_queue_room(&self, len: u32, within: Duration) {
        let _waiter = self.waiter();
        let until = Instant::now() + within;
        let full = || self.queue.lock().bytes() + u64::from(len) > (self.queue_bytes / 2).max(u64::from(len));
        while full() && Instant::now() < until {
            pass_gate(Gate::DiskRoom, tokio::time::sleep(QUEUE_POLL_EVERY)).await;
        }
    }

    /// Removes a chunk of `dataset` from the append queue, unless its append began.
    pub(crate) fn cancel_append(&self, key: &StoreKey, dataset: DatasetId) -> bool {
        let cancelled = self.queue.lock().cancel(key, dataset);
        self.promises.changed.notify_waiters();
        cancelled
    }

    /// Removes a chunk from the append queue, whoever waits for it. Blocks while it is being appended.
    pub(crate) fn cancel_appends(&self, key: &StoreKey) -> bool {
        let cancelled = self.queue.lock().cancel_all(key);
        self.promises.changed.notify_waiters();
        let until = std::time::Instant::now() + APPENDED_WITHIN;
        while self.queued_chunk(key).is_some() && std::time::Instant::now() < until {
            std::thread::sleep(QUEUE_POLL_EVERY);
        }
        cancelled
    }

    /// Returns the chunk if it is queued: it is not on disk, and may have left memory.
    pub(crate) fn queued_chunk(&self, key: &StoreKey) -> Option<Verified> {
        self.queue.lock().get(key)
    }
}

/// Somebody who waits for an append.
struct Waiter<'a>(&'a DiskTier);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().waiters -= 1;
    }
}

/// Appends in progress. Their bytes count as queued until they end, however that happens.
struct Group<'a> {
    disk: &'a DiskTier,
    appends: Vec<Append>,
}

impl Group<'_> {
    /// Writes the chunks, as far as their engine is open. It counts its errors and turns itself off.
    fn write(&mut self) {
        let mut newcomers = Vec::with_capacity(self.appends.len());
        let mut engine: Option<Arc<DiskEngine>> = None;
        for Append { key, dataset, chunk, reserved } in &mut self.appends {
            let Some(reserved) = reserved.take() else { continue };
            let Some(its_engine) = reserved.engine() else { continue };
            // Another one was opened since the chunk was queued: the old one is closed.
            if engine.as_ref().is_some_and(|engine| !Arc::ptr_eq(engine, &its_engine)) {
                newcomers.clear();
            }
            engine = Some(its_engine);
            newcomers.push(Newcomer { key, dataset: *dataset, chunk, reserved });
        }
        if let Some(Err(error)) = engine.map(|engine| engine.put_group(newcomers)) {
            tracing::debug!(%error, "chunks were not appended to the disk");
        }
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        let mut queue = self.disk.queue.lock();
        self.appends.iter().for_each(|append| queue.finish(append));
        drop(queue);
        self.disk.promises.changed.notify_waiters();
    }
}
