//! Reads bytes by a name that is not their hash, and learns their hash.
//!
//! A draft names bytes by where they are. The store fetches such bytes once, hashes them, has the hash
//! recorded, and keeps them under their hash. From then on the caller reads them by their hash.
//!
//! 1. (I1) The bytes are hashed, and nothing is known that could contradict the hash: the record decides.
//! 2. (I3) A name has one flight, as a hash has. Readers of a place that fails start one second flight.

use super::{Fetch, FlightRequest, INLINE_HASH_BYTES, Store};
use crate::{
    dataset_id::DatasetId,
    memory::bind_permit,
    outcome::{FetchError, Hit, ReadError, Tier},
    stats::Counters,
};
use fletch_core::{Hash, Kind, StoreKey, Verified};
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// The record of what names stand for.
pub trait Names: Send + Sync {
    /// Returns the hash of the bytes that `name` stands for, if it was learned.
    fn content(&self, name: &StoreKey) -> Option<Hash>;

    /// Records that `name` stands for these bytes. CPU-bound for long bytes.
    ///
    /// # Errors
    /// The error of the readers, if these bytes are not those of the name.
    fn learn(&self, name: &StoreKey, bytes: &Verified) -> Result<(), FetchError>;
}

impl Store {
    /// Returns the `len` bytes that `name` stands for, whose hash is not known yet. Calls `fetch` once.
    ///
    /// As [`Store::read`] otherwise. The returned chunk has the learned hash.
    ///
    /// # Errors
    /// [`ReadError`]; the error of [`Names::learn`] in [`ReadError::Fetch`].
    pub async fn learn(
        self: &Arc<Self>,
        name: StoreKey,
        len: u32,
        dataset: DatasetId,
        fetch: Fetch,
        names: Arc<dyn Names>,
    ) -> Result<Hit, ReadError> {
        let until = Instant::now() + self.limits.deadline;
        let request = FlightRequest { key: name, len, until, dataset, fetch, names: Some(names), run: None };
        self.join(request, None).await
    }

    /// Fetches the bytes that a name stands for, has their hash recorded, and keeps them for their dataset.
    pub(super) async fn learn_content(
        &self,
        request: &FlightRequest,
        names: Arc<dyn Names>,
        until: Instant,
    ) -> Result<Hit, ReadError> {
        let FlightRequest { key, len, dataset, fetch, .. } = request;
        let chunk = self.fetch_and_learn((key, *len, until), fetch, names).await?;
        Ok(self.keep_learned(key, *dataset, chunk))
    }

    async fn fetch_and_learn(
        &self,
        (name, len, until): (&StoreKey, u32, Instant),
        fetch: &Fetch,
        names: Arc<dyn Names>,
    ) -> Result<Verified, ReadError> {
        let within = self.limits.deadline;
        let permit = self.memory.permit(len, until).await.ok_or(ReadError::Overloaded { len, within })?;
        Counters::add(&self.counters.fetches, 1);
        let bytes = match timeout_at(until, fetch(0)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(e)) => {
                Counters::add(&self.counters.fetch_errors, 1);
                return Err(e.into());
            }
            Err(_) => return Err(ReadError::Deadline(within)),
        };
        if bytes.len() != len as usize {
            Counters::add(&self.counters.corrupt, 1);
            let why = format!("{} bytes came in place of {len}", bytes.len());
            return Err(FetchError::new(Kind::Corrupt, why).into());
        }
        let (bytes, name) = (bind_permit(bytes, permit), name.clone());
        let hash_and_record = move || {
            let chunk = Verified::of(bytes);
            names.learn(&name, &chunk)?;
            Ok(chunk)
        };
        if len as usize <= INLINE_HASH_BYTES {
            return hash_and_record();
        }
        tokio::task::spawn_blocking(hash_and_record).await.map_err(|_| ReadError::Lost)?
    }

    /// Keeps bytes under their hash. Another name may have brought the same bytes before.
    fn keep_learned(&self, name: &StoreKey, dataset: DatasetId, chunk: Verified) -> Hit {
        let key = StoreKey { domain: name.domain.clone(), hash: chunk.hash() };
        let len = u32::try_from(chunk.bytes().len()).unwrap_or(u32::MAX);
        match &self.disk {
            Some(disk) if disk.has_or_queued(&key, len) => {
                Counters::add(&self.counters.fetched_bytes, u64::from(len));
                disk.use_chunk(&key, dataset);
                Hit { chunk, tier: Tier::Origin }
            }
            _ => self.fetched(&key, dataset, chunk),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreLimits;
    use bytes::Bytes;
    use fletch_core::Domain;
    use parking_lot::Mutex;
    use std::{
        collections::HashMap,
        sync::atomic::{AtomicU32, Ordering::Relaxed},
        time::Duration,
    };
    use tokio_util::task::TaskTracker;

    const ANY: DatasetId = DatasetId(1);

    #[derive(Default)]
    struct Record(Mutex<HashMap<Hash, Hash>>);

    impl Names for Record {
        fn content(&self, name: &StoreKey) -> Option<Hash> {
            self.0.lock().get(&name.hash).copied()
        }

        fn learn(&self, name: &StoreKey, bytes: &Verified) -> Result<(), FetchError> {
            match self.0.lock().insert(name.hash, bytes.hash()) {
                Some(before) if before != bytes.hash() => {
                    Err(FetchError::new(Kind::Corrupt, "other bytes than before"))
                }
                _ => Ok(()),
            }
        }
    }

    fn store() -> Arc<Store> {
        let limits =
            StoreLimits { memory_bytes: 64 << 20, deadline: Duration::from_millis(500), attempts: 2 };
        Store::new(limits, None, TaskTracker::new())
    }

    fn name(text: &str) -> StoreKey {
        StoreKey { domain: Domain::default_domain(), hash: Hash::of(text.as_bytes()) }
    }

    /// Returns a fetch of `bytes` that takes 20 ms, and the number of its calls.
    fn slow_fetch(bytes: &Bytes) -> (Fetch, Arc<AtomicU32>) {
        let calls = Arc::new(AtomicU32::new(0));
        let (bytes, counted) = (bytes.clone(), Arc::clone(&calls));
        let fetch: Fetch = Arc::new(move |_| {
            counted.fetch_add(1, Relaxed);
            let bytes = bytes.clone();
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok(bytes)
            })
        });
        (fetch, calls)
    }

    #[tokio::test]
    async fn i3_a_name_is_fetched_once_and_read_by_its_hash_from_then_on() {
        let (s, record) = (store(), Arc::new(Record::default()));
        for len in [3_000_u32, 1 << 20] {
            let bytes = Bytes::from(vec![7; len as usize]);
            let (fetch, calls) = slow_fetch(&bytes);
            let named = name(&len.to_string());
            let read = || s.learn(named.clone(), len, ANY, Arc::clone(&fetch), Arc::clone(&record) as _);
            let hits = futures::future::join_all((0..20).map(|_| read())).await;
            let of = |tier| hits.iter().filter(|hit| hit.as_ref().is_ok_and(|hit| hit.tier == tier)).count();
            assert_eq!((of(Tier::Origin), of(Tier::Flight), calls.load(Relaxed)), (1, 19, 1));
            let hash = record.content(&named).expect("learned");
            assert_eq!(hash, Hash::of(&bytes));
            let by_hash = s.cached(&StoreKey { hash, ..named.clone() }).expect("kept under its hash");
            assert_eq!(by_hash.chunk.bytes(), &bytes);
            assert!(s.cached(&named).is_none(), "nothing is kept under the name");
            assert_eq!(read().await.expect("again").tier, Tier::Memory);
            assert_eq!(calls.load(Relaxed), 1);
        }
    }

    #[tokio::test]
    async fn i3_however_many_wait_for_a_place_that_fails_it_is_asked_twice() {
        let (s, record) = (store(), Arc::new(Record::default()));
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let fetch: Fetch = Arc::new(move |_| {
            counted.fetch_add(1, Relaxed);
            Box::pin(async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Err(FetchError::new(Kind::Corrupt, "the object is gone"))
            })
        });
        let read = || s.learn(name("gone"), 9, ANY, Arc::clone(&fetch), Arc::clone(&record) as _);
        let outcomes = futures::future::join_all((0..200).map(|_| read())).await;
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(ReadError::Fetch(_)))));
        assert_eq!(calls.load(Relaxed), 2);
    }

    #[tokio::test]
    async fn i1_a_record_of_other_bytes_and_another_length_are_errors() {
        let (s, record) = (store(), Arc::new(Record::default()));
        let bytes = Bytes::from_static(b"the bytes");
        let (fetch, _) = slow_fetch(&bytes);
        let short = s.learn(name("a"), 8, ANY, Arc::clone(&fetch), Arc::clone(&record) as _).await;
        assert_eq!(short.expect_err("nine bytes").kind(), Kind::Corrupt);
        assert_eq!(record.content(&name("a")), None, "nothing was learned");
        record.0.lock().insert(name("b").hash, Hash::of(b"others"));
        let known = s.learn(name("b"), 9, ANY, fetch, Arc::clone(&record) as _).await;
        assert_eq!(known.expect_err("read by the recorded hash").kind(), Kind::Corrupt);
        assert_eq!(s.stats().cached_chunks, 0);
    }
}
