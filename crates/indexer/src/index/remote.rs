//! Reads the objects of a store: lists them, in the order of entries, and reads each once, pinned by its
//! etag.
//!
//! Reads an object of more than 4 MiB by slices. Bounds: objects under way ([`OBJECTS_MAX`]) and bytes in
//! memory ([`BYTES_MAX`]).

use super::Outcome;
use crate::failure::Failure;
use crate::run::Counters;
use crate::run::file_record::FileRecord;
use crate::run::groups::RunGroups;
use crate::source::content::{
    Content, SliceHash, add_groups, end_shard, fold, hash_slice, hash_whole, sharder, slice_at, slice_count,
};
use crate::source::draft::{DraftEntries, entries, places};
use crate::source::listing::{KeySorting, Listed, ListingError, Objects};
use crate::source::name_list::NameList;
use crate::source::outage::OutageJudge;
use crate::source::pin::{origin_pin, pin_row};
use fletch_core::Hash;
use fletch_core::manifest::SLICE_BYTES_DEFAULT;
use fletch_core::manifest::tar::BadTar;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{ObjectBytes, ObjectMeta, Origin, OriginError, Pin};
use fletch_tables::PinRow;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::sync::Semaphore;

/// The most objects under way, unless the caller takes less.
pub const OBJECTS_MAX: usize = 64;
/// The most slices of one object under way.
const SLICES_MAX: usize = 8;
/// The most bytes of bodies in memory.
const BYTES_MAX: u32 = 128 << 20;
/// Bodies of this length or more are hashed on a blocking thread, in bytes.
const BLOCKING_BYTES: usize = 64 << 10;

/// What to list, and how.
pub struct Listing<'a> {
    /// The dataset.
    pub origin: &'a Origin,
    /// The draft whose entries are read; `None` for those of the store.
    pub seal: Option<Arc<dyn DraftEntries>>,
    /// The most objects under way.
    pub objects_max: usize,
    /// The names of its objects; `None` to list them.
    pub names: Option<&'a NameList>,
    /// Prefixes that are not listed.
    pub exclude: BTreeSet<String>,
    /// How keys are put into order.
    pub sorting: KeySorting<'a>,
    /// The URI of the dataset at the server, to make a draft: no object is read.
    pub draft: Option<&'a str>,
    /// Where the hashes of groups go.
    pub groups: RunGroups,
}

struct Reader<'a> {
    origin: &'a Origin,
    counters: &'a Counters,
    memory: Semaphore,
    judge: OutageJudge<'a>,
    draft: Option<&'a str>,
    groups: RunGroups,
}

/// Lists and reads the dataset, and passes every outcome, in order, to `take`.
///
/// # Errors
/// The failure of the listing, `known` or `take`, an outage of the origin, or that `stop` was set;
/// [`ListingError::Unsorted`] if the run must begin anew with sorted keys.
pub async fn run(
    listing: Listing<'_>,
    counters: &Counters,
    stop: &AtomicBool,
    mut known: impl FnMut(&str) -> Result<Option<FileRecord>, Failure>,
    mut take: impl FnMut(Outcome) -> Result<(), Failure>,
) -> Result<(), ListingError> {
    let Listing { origin, seal, objects_max, names, exclude, sorting, draft, groups } = listing;
    let judge = OutageJudge::new(origin, None);
    let memory = Semaphore::new(BYTES_MAX as usize);
    let reader = Reader { origin, counters, memory, judge, draft, groups };
    let reader = &reader;
    let objects = match seal {
        Some(draft) => entries(draft).boxed(),
        None => {
            let objects = Objects::new(origin, names, exclude, sorting);
            let objects = stream::try_unfold(objects, |mut objects| async move {
                let next = objects.next().await?;
                Ok::<_, ListingError>(next.map(|object| (object, objects)))
            });
            objects.boxed()
        }
    };
    let outcomes = objects
        .map(|object| {
            let looked_up = object.and_then(|listed| {
                let known = match &listed {
                    Listed::Object(o) => known(&o.path)?,
                    Listed::EmptyDir { .. }
                    | Listed::Link { .. }
                    | Listed::Fault { .. }
                    | Listed::Failed { .. } => None,
                };
                Ok((listed, known))
            });
            async move {
                Ok::<_, ListingError>(match looked_up? {
                    (Listed::Object(object), known) => reader.object(object, known).await?,
                    (Listed::EmptyDir { path }, _) => Outcome::DirEnd { path },
                    (Listed::Link { path, target }, _) => Outcome::Link { path, target },
                    (Listed::Fault { path, why }, _) => Outcome::Fault { path, why },
                    (Listed::Failed { path, error }, _) => reader.failed(path, error).await?,
                })
            }
        })
        .buffered(objects_max);
    let mut outcomes = std::pin::pin!(outcomes);
    while let Some(outcome) = outcomes.try_next().await? {
        Failure::if_stopped(stop)?;
        take(outcome)?;
    }
    Ok(reader.judge.finish()?)
}

impl Reader<'_> {
    async fn object(&self, object: ObjectMeta, known: Option<FileRecord>) -> Result<Outcome, Failure> {
        let pin = pin_row(object.pin());
        let path = object.path;
        if let Some(uri) = self.draft {
            let content = places(uri, &path, &pin);
            return Ok(Outcome::File { path, pin, content, reused: false, plain: None });
        }
        if let Some(known) = known.filter(|k| k.proves(&pin)) {
            self.counters.reuse(1, pin.size);
            self.judge.unchanged(&path, pin.size);
            return Ok(Outcome::File { path, pin, content: known.content, reused: true, plain: None });
        }
        let mut plain = None;
        let mut read = None;
        if is_shard(&path) {
            match self.shard(&path, &pin).await {
                Ok(Ok(content)) => read = Some(Ok(content)),
                Ok(Err(bad)) => plain = Some(bad.to_string()),
                Err(e) => read = Some(Err(e)),
            }
        }
        let read = match read {
            Some(read) => read,
            None => self.content(&path, &pin).await,
        };
        Ok(match read {
            Ok(content) => {
                self.counters.files_read.fetch_add(1, Relaxed);
                self.judge.read(&path, pin.size);
                Outcome::File { path, pin, content, reused: false, plain }
            }
            Err(OriginError::Changed { .. }) => {
                let why = "it changed between listing and reading; stop its writer and run again";
                Outcome::Lost { path, why: why.into() }
            }
            Err(e) => self.failed(path, e).await?,
        })
    }

    /// Returns the fault of an object that could not be read, unless its origin is away.
    async fn failed(&self, path: String, error: OriginError) -> Result<Outcome, Failure> {
        let why = self.judge.judge(error).await?;
        Ok(Outcome::Lost { path: path.escape_debug().to_string(), why })
    }

    /// Reads and hashes a tar shard, slice by slice. The inner error says why it is not a readable archive.
    async fn shard(&self, path: &str, pin: &PinRow) -> Result<Result<Content, BadTar>, OriginError> {
        let lists = self.groups.lists().map(|lists| &**lists);
        let mut sharder = sharder(lists);
        let bodies = self.slices(path, pin, |_, bytes| bytes.to_vec());
        let mut bodies = std::pin::pin!(bodies);
        while let Some(bytes) = bodies.try_next().await? {
            let fed = tokio::task::spawn_blocking(move || {
                let fed = sharder.feed(&bytes);
                (sharder, fed)
            });
            let lost = |e: tokio::task::JoinError| OriginError::Unavailable {
                what: path.to_owned(),
                why: e.to_string(),
            };
            let (after, fed) = fed.await.map_err(lost)?;
            sharder = after;
            sharder.take_groups().into_iter().for_each(|of_chunk| add_groups(lists, Some(of_chunk)));
            if let Err(bad) = fed {
                return Ok(Err(bad));
            }
        }
        Ok(end_shard(sharder, lists))
    }

    async fn content(&self, path: &str, pin: &PinRow) -> Result<Content, OriginError> {
        if pin.size == 0 {
            return Ok(Content::whole(Hash::of(&[]), 0));
        }
        if pin.size <= u64::from(SLICE_BYTES_DEFAULT) {
            let len = u32::try_from(pin.size).unwrap_or(SLICE_BYTES_DEFAULT);
            let groups = self.groups.clone();
            let hash = move |bytes: &[u8]| hash_whole(bytes, groups.lists().map(|lists| &**lists));
            let (hash, _) = self.read(path, &origin_pin(pin), (0, len), hash).await?;
            return Ok(Content::whole(hash, len));
        }
        let groups = self.groups.clone();
        let slices = self.slices(path, pin, move |offset, bytes| {
            hash_slice(offset, bytes, groups.lists().map(|lists| &**lists))
        });
        Ok(fold(pin.size, &slices.try_collect::<Vec<SliceHash>>().await?))
    }

    /// Reads an object by slices, and hashes each. The later slices are of the same state as the first one,
    /// whatever form the tag has in the listing.
    fn slices<'s, T: Send + 'static>(
        &'s self,
        path: &'s str,
        pin: &'s PinRow,
        hash: impl Fn(u64, &[u8]) -> T + Clone + Send + 'static,
    ) -> impl Stream<Item = Result<T, OriginError>> + 's {
        let at = |i| slice_at(pin.size, i);
        let first = async move {
            let listed = origin_pin(pin);
            let first = hash.clone();
            let (hashed, meta) = self.read(path, &listed, at(0), move |bytes| first(0, bytes)).await?;
            let later = Arc::new(listed.of_later_ranges(&meta));
            let rest = stream::iter(1..slice_count(pin.size)).map(move |i| {
                let (slice, later, hash) = (at(i), Arc::clone(&later), hash.clone());
                async move {
                    let read = self.read(path, &later, slice, move |bytes| hash(slice.0, bytes)).await;
                    read.map(|(hashed, _)| hashed)
                }
            });
            Ok(stream::once(std::future::ready(Ok(hashed))).chain(rest.buffered(SLICES_MAX)))
        };
        stream::once(first).try_flatten()
    }

    async fn read<T: Send + 'static>(
        &self,
        path: &str,
        pin: &Pin,
        (offset, len): (u64, u32),
        hash: impl FnOnce(&[u8]) -> T + Send + 'static,
    ) -> Result<(T, ObjectMeta), OriginError> {
        let gone = |_| OriginError::Unavailable { what: path.to_owned(), why: "the run is ending".into() };
        let _memory = self.memory.acquire_many(len.max(1)).await.map_err(gone)?;
        let whole = offset == 0 && u64::from(len) == pin.size;
        let range = (!whole).then(|| offset..offset + u64::from(len));
        let ObjectBytes { bytes, meta } = self.origin.get(path, range, Some(pin)).await?;
        self.counters.bytes_read.fetch_add(bytes.len() as u64, Relaxed);
        if bytes.len() < BLOCKING_BYTES {
            return Ok((hash(&bytes), meta));
        }
        let shared = Arc::new(bytes);
        let hashed = tokio::task::spawn_blocking(move || hash(&shared)).await;
        hashed
            .map(|hashed| (hashed, meta))
            .map_err(|e| OriginError::Unavailable { what: path.to_owned(), why: e.to_string() })
    }
}
