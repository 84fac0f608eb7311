//! The objects of a dataset in a store, in the byte order of their paths.
//!
//! A store lists keys. Not every key is an entry:
//!
//! | key | becomes |
//! |---|---|
//! | an empty object that ends in `/` | nothing if keys lie below it, else an empty directory |
//! | an empty object that is also a folder of other keys | nothing |
//! | another key that ends in `/`, or is no clean relative path | a fault of this key |
//!
//! Consoles and file systems over stores write such empty objects as markers of folders.
//!
//! Invariants:
//! 1. The items come in the byte order of their paths. If a store lists in another order, all keys are sorted
//!    first, on disk beyond [`sorted::MEMORY_BYTES_MAX`].
//! 2. A marker costs a request only if other keys come between it and what lies below it. Beyond
//!    [`ASKS_MAX`] such requests, all keys are collected instead.

use super::name_list::NameList;
use crate::failure::Failure;
use crate::out::Out;
use fletch_origin::{ObjectMeta, Origin, OriginError, is_path};
use fletch_tables::paths;
use futures::stream::{BoxStream, Fuse};
use futures::{StreamExt, TryStreamExt, stream};
use sorted::{SortedKeys, SortedKeysWriter};
use std::collections::{BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

mod sorted;

/// HEAD requests under way at once.
const HEADS_MAX: usize = 64;
/// The number of first keys whose order is checked before any of them is returned.
const FIRST_KEYS: usize = 1000;
/// The most questions whether keys lie below an empty object.
const ASKS_MAX: u32 = 1000;

/// One item of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    Object(ObjectMeta),
    /// The marker of a folder without other keys.
    EmptyDir {
        /// Its path, without a slash at the end.
        path: String,
    },
    /// A symbolic link. Only drafts of directories have links.
    Link {
        path: String,
        /// Its target, verbatim.
        target: String,
    },
    /// A key that cannot be an entry.
    Fault {
        /// Its path, with unprintable bytes escaped.
        path: String,
        /// Why, and what to do next.
        why: String,
    },
    /// A name of a list whose object could not be looked up.
    Failed {
        path: String,
        /// The error of the origin.
        error: OriginError,
    },
}

/// How keys are put into the order of their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOrder {
    /// The store lists in this order. If the first keys show that it does not, all are sorted.
    Listed,
    /// All keys are collected and sorted before the first one is returned.
    Sorted,
}

/// How a listing is put into order.
#[derive(Clone, Copy)]
pub struct KeySorting<'a> {
    /// Whether the store's own order is trusted.
    pub order: KeyOrder,
    /// Where keys are sorted that do not fit into memory.
    pub scratch: &'a Path,
    /// Who is told that keys have to be sorted.
    pub out: Option<Out>,
}

/// Why a listing ended early.
#[derive(Debug)]
pub enum ListingError {
    /// The listing failed.
    Failure(Failure),
    /// The keys have to be sorted: the caller begins anew with [`KeyOrder::Sorted`].
    Unsorted,
}

impl ListingError {
    /// Returns the failure of a run that cannot begin anew.
    #[must_use]
    pub fn failure(self) -> Failure {
        match self {
            ListingError::Failure(failure) => failure,
            ListingError::Unsorted => {
                Failure::new("the keys of the listing are out of order after they were sorted")
                    .hint("this is a fault of Fletch: report it with the name of the store")
            }
        }
    }
}

impl From<Failure> for ListingError {
    fn from(failure: Failure) -> Self {
        ListingError::Failure(failure)
    }
}

impl From<OriginError> for ListingError {
    fn from(error: OriginError) -> Self {
        ListingError::Failure(error.into())
    }
}

/// Where the keys come from.
enum Keys {
    /// A listing in byte order, its first keys checked and waiting in front.
    Listed { first: VecDeque<ObjectMeta>, rest: Fuse<BoxStream<'static, Result<ObjectMeta, OriginError>>> },
    /// All keys of a listing, sorted.
    Sorted(SortedKeys),
    /// The objects of a list of names.
    Named(Fuse<BoxStream<'static, Listed>>),
}

/// A key that may be a marker, until the next key shows it.
struct Held {
    object: ObjectMeta,
    /// Whether keys lie below it, where that is known.
    has_below: Option<bool>,
}

/// The objects of a dataset, without what is not part of a version.
pub struct Objects {
    origin: Origin,
    keys: Option<Keys>,
    names: Option<NameList>,
    order: KeyOrder,
    scratch: PathBuf,
    out: Option<Out>,
    /// The last key.
    last: Option<String>,
    held: Option<Held>,
    ready: VecDeque<Listed>,
    exclude: BTreeSet<String>,
    asked: u32,
}

impl Objects {
    /// Begins before the first object. Leaves out `fletch/` and everything below `exclude`.
    #[must_use]
    pub fn new(
        origin: &Origin,
        names: Option<&NameList>,
        exclude: BTreeSet<String>,
        sorting: KeySorting<'_>,
    ) -> Self {
        let KeySorting { order, scratch, out } = sorting;
        Objects {
            origin: origin.clone(),
            keys: None,
            names: names.cloned(),
            order,
            scratch: scratch.to_owned(),
            out,
            last: None,
            held: None,
            ready: VecDeque::new(),
            exclude,
            asked: 0,
        }
    }

    /// Returns the next item; `None` at the end.
    ///
    /// # Errors
    /// [`ListingError`].
    pub async fn next(&mut self) -> Result<Option<Listed>, ListingError> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Ok(Some(item));
            }
            let Some((object, has_below)) = self.next_key().await? else {
                if let Some(item) = self.ready.pop_front() {
                    return Ok(Some(item));
                }
                return Ok(self.held.take().map(|held| alone(held.object)));
            };
            if let Some(held) = self.held.take()
                && !self.is_folder(&held, &object.path).await?
            {
                self.ready.push_back(alone(held.object));
            }
            let below = |dir: &str| object.path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'));
            if object.path.starts_with(paths::PREFIX) || self.exclude.iter().any(|dir| below(dir)) {
                continue;
            }
            match self.classified(object) {
                Ok(object) if object.size == 0 => self.held = Some(Held { object, has_below }),
                Ok(object) => self.ready.push_back(Listed::Object(object)),
                Err(fault) => self.ready.push_back(fault),
            }
        }
    }

    /// Returns an object that can be an entry or a marker, or the fault of its key.
    fn classified(&self, object: ObjectMeta) -> Result<ObjectMeta, Listed> {
        let why = match (object.path.strip_suffix('/'), object.size) {
            (Some(dir), 0) if is_path(dir) => return Ok(object),
            (None, _) if is_path(&object.path) => {
                // The parser of URLs would drop these characters.
                if !(self.origin.uri().is_plain_http() && object.path.contains(['\t', '\n', '\r'])) {
                    return Ok(object);
                }
                "its name has a tab or a line break, which no URL can carry; rename it".to_owned()
            }
            (Some(dir), size) if is_path(dir) => {
                format!("its key ends in a slash, and it holds {size} bytes; rename the object")
            }
            _ => "its key has an empty, `.` or `..` component, a NUL byte or a leading slash, or is longer \
                  than 4096 bytes; rename the object"
                .to_owned(),
        };
        Err(Listed::Fault { path: object.path.escape_debug().to_string(), why })
    }

    /// Whether keys lie below an empty object, after which `next` is the next key.
    async fn is_folder(&mut self, held: &Held, next: &str) -> Result<bool, ListingError> {
        let path = held.object.path.as_str();
        let dir = path.strip_suffix('/').unwrap_or(path);
        let Some(rest) = next.strip_prefix(dir) else { return Ok(false) };
        if rest.starts_with('/') {
            return Ok(true);
        }
        // Keys such as `train.csv` come between `train` and `train/1.jpg`.
        if path.ends_with('/') || rest.as_bytes().first().is_none_or(|byte| *byte > b'/') {
            return Ok(false);
        }
        if let Some(known) = held.has_below {
            return Ok(known);
        }
        if let Some(names) = &self.names {
            return Ok(names.has_below(dir));
        }
        self.asked += 1;
        if self.asked > ASKS_MAX {
            return Err(ListingError::Unsorted);
        }
        Ok(self.origin.has_below(dir).await?)
    }

    /// Returns the next key in byte order, and whether keys lie below it if that is known.
    async fn next_key(&mut self) -> Result<Option<(ObjectMeta, Option<bool>)>, ListingError> {
        if self.keys.is_none() {
            self.keys = Some(self.open().await?);
        }
        loop {
            let object = match &mut self.keys {
                None => return Ok(None),
                Some(Keys::Sorted(keys)) => {
                    let next = keys.next_key().map_err(|e| Failure::scratch(&e))?;
                    return Ok(next.map(|(object, has_below)| (object, Some(has_below))));
                }
                Some(Keys::Named(heads)) => match heads.next().await {
                    None => return Ok(None),
                    Some(Listed::Object(object)) => return Ok(Some((object, None))),
                    Some(failed) => {
                        self.ready.push_back(failed);
                        continue;
                    }
                },
                Some(Keys::Listed { first, rest }) => match first.pop_front() {
                    Some(object) => object,
                    None => match rest.try_next().await? {
                        Some(object) => object,
                        None => return Ok(None),
                    },
                },
            };
            match self.last.as_ref().map(|last| object.path.cmp(last)) {
                Some(std::cmp::Ordering::Less) => return Err(ListingError::Unsorted),
                Some(std::cmp::Ordering::Equal) => continue,
                _ => {}
            }
            self.last = Some(object.path.clone());
            return Ok(Some((object, None)));
        }
    }

    /// Opens the listing, and reads as many keys as show its order.
    async fn open(&mut self) -> Result<Keys, ListingError> {
        if let Some(names) = &self.names {
            return Ok(Keys::Named(looked_up(&self.origin, names).fuse()));
        }
        let mut list = self.origin.list("").fuse();
        let mut first: VecDeque<ObjectMeta> = VecDeque::new();
        let mut is_sorted = self.order == KeyOrder::Listed;
        while is_sorted && first.len() < FIRST_KEYS {
            let Some(object) = list.try_next().await? else { break };
            is_sorted = first.back().is_none_or(|last| last.path <= object.path);
            first.push_back(object);
        }
        if is_sorted {
            return Ok(Keys::Listed { first, rest: list });
        }
        if self.order == KeyOrder::Listed
            && let Some(out) = self.out
        {
            out.note("the store does not list its keys in byte order: all keys are listed and sorted first");
        }
        let mut keys = SortedKeysWriter::new(&self.scratch).map_err(|e| Failure::scratch(&e))?;
        for object in first {
            keys.push(&object).map_err(|e| Failure::scratch(&e))?;
        }
        while let Some(object) = list.try_next().await? {
            keys.push(&object).map_err(|e| Failure::scratch(&e))?;
        }
        Ok(Keys::Sorted(keys.finish().map_err(|e| Failure::scratch(&e))?))
    }
}

/// Returns what an object becomes below which no key lies.
fn alone(object: ObjectMeta) -> Listed {
    match object.path.strip_suffix('/') {
        Some(dir) => Listed::EmptyDir { path: dir.to_owned() },
        None => Listed::Object(object),
    }
}

/// Looks the names of a list up.
fn looked_up(origin: &Origin, names: &NameList) -> BoxStream<'static, Listed> {
    let (origin, names) = (origin.clone(), names.clone());
    let count = names.names().len();
    stream::iter(0..count)
        .map(move |i| {
            let (origin, path) = (origin.clone(), names.names()[i].to_string());
            async move {
                match origin.head(&path).await {
                    Ok(meta) => Listed::Object(meta),
                    Err(error) => Listed::Failed { path, error },
                }
            }
        })
        .buffered(HEADS_MAX)
        .boxed()
}

/// Passes the paths of the first objects to `see`, in the order of the store, until it breaks.
///
/// # Errors
/// [`Failure`] when the listing fails.
pub async fn first_paths(
    origin: &Origin,
    mut see: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<(), Failure> {
    let mut objects = origin.list("");
    while let Some(object) = objects.try_next().await? {
        if is_path(&object.path) && !object.path.starts_with(paths::PREFIX) && see(&object.path).is_break() {
            break;
        }
    }
    Ok(())
}
