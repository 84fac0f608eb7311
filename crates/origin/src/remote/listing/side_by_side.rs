//! Lists the folders of a long listing at the same time: a store answers each page only after its round trip.
//!
//! After [`PAGES_ALONE`] pages with large folders, a listing with a delimiter names what lies directly below
//! the prefix. The keys of each folder are then a listing of their own, which may be split again. The first
//! [`HEAD_PAGES`] pages of up to [`FOLDERS_AT_ONCE`] folders are asked for together.
//!
//! Invariants:
//! 1. The keys are those of the listing page by page, each once, whatever the order of the store. If that is
//!    the order of their bytes, they are returned in it.
//! 2. A folder costs a request at least. So a prefix is split only where the folders of the first pages, and
//!    [`SAMPLED_MAX`] of the first thousand folders, have half a page each on average.
//! 3. A store that refuses or ignores delimiters, or the prefixes of these folders, is listed page by page.
//!    So is one with a hierarchical namespace, whose empty directories only such a listing has.
//! 4. At most [`LEVELS_MAX`] × [`FOLDERS_AT_ONCE`] × [`HEAD_PAGES`] pages wait in memory.

use super::super::translate::{unavailable, wrong_answer};
use super::{Pages, Start};
use crate::OriginError;
use crate::object::ObjectMeta;
use crate::transport::Page;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _, future, stream};
use std::collections::HashSet;
use std::sync::Arc;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

/// The pages that are listed one by one before folders are listed side by side.
const PAGES_ALONE: u32 = 3;
/// The pages of a folder that are read ahead.
const HEAD_PAGES: usize = 2;
/// The folders of one prefix that are listed at once.
const FOLDERS_AT_ONCE: usize = 16;
/// The folders whose first pages show whether the others are large, too.
const SAMPLED_MAX: usize = 16;
/// The most prefixes, each a part of the next one, whose folders are listed side by side.
const LEVELS_MAX: u32 = 4;

type PageStream = BoxStream<'static, Result<Vec<ObjectMeta>, OriginError>>;

/// What the first pages of a prefix show about its folders.
#[derive(Debug, Default)]
pub(super) struct FoldersSeen {
    /// The number of splits above this prefix.
    level: u32,
    pages: u32,
    keys: usize,
    /// The keys of the longest page.
    page_keys: usize,
    /// The number of times that a key lies in another folder than the key before.
    folders: usize,
    last: String,
    /// The keys, to leave them out after a split.
    listed: HashSet<String>,
    /// Whether the first pages are over, or show that a split would be wrong.
    is_over: bool,
}

impl FoldersSeen {
    pub fn at_level(level: u32) -> Self {
        FoldersSeen { level, is_over: level >= LEVELS_MAX, ..FoldersSeen::default() }
    }

    /// Counts a page of the keys below `prefix`.
    pub fn add(&mut self, prefix: &str, page: &Page) {
        if self.is_over || page.has_directories {
            self.is_over = true;
            self.listed = HashSet::new();
            return;
        }
        self.pages += 1;
        self.keys += page.objects.len();
        self.page_keys = self.page_keys.max(page.objects.len());
        for object in &page.objects {
            let folder = folder_of(prefix, &object.path);
            if folder.is_some() && folder != folder_of(prefix, &self.last) {
                self.folders += 1;
            }
            self.last.clone_from(&object.path);
            self.listed.insert(object.path.clone());
        }
    }

    /// Whether the first pages show that folders should be listed side by side.
    fn asks_for_split(&self) -> bool {
        let are_large = self.keys * 2 >= self.folders * self.page_keys;
        !self.is_over && self.pages == PAGES_ALONE && self.keys > 0 && are_large
    }
}

/// Returns the folder directly below `prefix` in which a key lies, with its slash.
fn folder_of<'a>(prefix: &str, key: &'a str) -> Option<&'a str> {
    let rest = key.strip_prefix(prefix)?;
    rest.find('/').map(|slash| &key[..=prefix.len() + slash])
}

/// What lies directly below a prefix.
#[derive(Debug)]
enum Child {
    Object(ObjectMeta),
    /// The prefix of a folder's keys.
    Folder(String),
}

impl Child {
    fn key(&self) -> &str {
        match self {
            Child::Object(object) => &object.path,
            Child::Folder(prefix) => prefix,
        }
    }
}

/// The first pages of a folder, and how it goes on.
struct Head {
    pages: Vec<Vec<ObjectMeta>>,
    rest: Option<Pages>,
}

/// How a listing goes on after a split.
struct Split {
    /// The first children, in order.
    first: Vec<Child>,
    /// The pages of the other children.
    children: Pages,
    level: u32,
}

impl Pages {
    /// Returns all pages, folders side by side where that is faster.
    pub(super) fn listed(self) -> PageStream {
        let pages = stream::unfold(Some(self), |pages| async move {
            let mut pages = pages?;
            if pages.next.is_some()
                && pages.seen.as_ref().is_some_and(FoldersSeen::asks_for_split)
                && let Some(split) = pages.split().await
            {
                return Some((split.listed(), None));
            }
            let page = pages.keys().await.transpose()?;
            Some((stream::iter([page]).boxed(), Some(pages)))
        });
        pages.flatten().boxed()
    }

    /// Finds what lies directly below the prefix. `None` if the pages go on one by one.
    ///
    /// An error here is none of the listing: a policy may allow no delimiter, or only this prefix.
    async fn split(&mut self) -> Option<Split> {
        let seen = self.seen.as_mut()?;
        seen.is_over = true;
        let mut known = std::mem::take(&mut seen.listed);
        known.extend(self.known.iter().cloned());
        let level = seen.level + 1;
        let mut children = Pages {
            is_delimited: true,
            own_marker: self.own_marker.clone(),
            known: Arc::new(known),
            ..Pages::new(self.location.clone(), self.what.clone(), self.prefix.clone())
        };
        let first = children.children().await.ok()??;
        let page_keys = self.seen.as_ref()?.page_keys;
        children.has_large_folders(&first, page_keys).await.then_some(Split { first, children, level })
    }

    /// Whether folders among these children may be listed, and have half a page of keys each on average.
    async fn has_large_folders(&self, first: &[Child], page_keys: usize) -> bool {
        let folders: Vec<&str> =
            first.iter().filter(|child| matches!(child, Child::Folder(_))).map(Child::key).collect();
        let sampled = folders.iter().step_by(folders.len().div_ceil(SAMPLED_MAX).max(1));
        let pages = sampled.map(|folder| {
            let mut pages = self.folder((*folder).to_owned(), LEVELS_MAX);
            async move { pages.next_page().await }
        });
        let pages: Result<Vec<Option<Page>>, OriginError> = future::try_join_all(pages).await;
        let Ok(pages) = pages else { return false };
        let keys: usize = pages.iter().flatten().map(|page| page.objects.len()).sum();
        // Few folders cost few requests, whatever they hold.
        let are_few = self.next.is_none() && folders.len() <= SAMPLED_MAX;
        !pages.is_empty() && (are_few || keys * 2 >= pages.len() * page_keys)
    }

    /// Returns the next page of what lies directly below the prefix, in order. `None` after the last page.
    async fn children(&mut self) -> Result<Option<Vec<Child>>, OriginError> {
        let Some(page) = self.next_page().await? else { return Ok(None) };
        // After the name of a folder, some stores would go on with its keys.
        if matches!(self.next, Some(Start::After(_))) {
            return Err(wrong_answer(&self.what, "a page with a delimiter has no token for the next one"));
        }
        for folder in &page.prefixes {
            if folder_of(&self.prefix, folder) != Some(folder) {
                let why = format!("the listing of {:?} has the folder {folder:?}", self.prefix);
                return Err(wrong_answer(&self.what, why));
            }
        }
        let new = page.objects.into_iter().filter(|object| !self.known.contains(&object.path));
        let objects = new.map(Child::Object);
        let mut all: Vec<Child> = objects.chain(page.prefixes.into_iter().map(Child::Folder)).collect();
        all.sort_by(|a, b| a.key().cmp(b.key()));
        Ok(Some(all))
    }

    /// Returns the pages of a folder below this prefix.
    fn folder(&self, prefix: String, level: u32) -> Pages {
        Pages {
            own_marker: self.own_marker.clone(),
            known: Arc::clone(&self.known),
            seen: Some(FoldersSeen::at_level(level)),
            ..Pages::new(self.location.clone(), self.what.clone(), prefix)
        }
    }

    fn listed_object(&self, object: ObjectMeta) -> ObjectMeta {
        super::listed(object, self.location.key_prefix("").len())
    }

    /// Reads the first pages.
    async fn head(mut self) -> Result<Head, OriginError> {
        let mut pages = Vec::new();
        while pages.len() < HEAD_PAGES {
            match self.keys().await? {
                Some(page) => pages.push(page),
                None => break,
            }
        }
        let rest = self.next.is_some().then_some(self);
        Ok(Head { pages, rest })
    }
}

impl Head {
    fn of(object: ObjectMeta) -> Self {
        Head { pages: vec![vec![object]], rest: None }
    }

    fn listed(self) -> PageStream {
        let first = stream::iter(self.pages.into_iter().map(Ok));
        match self.rest {
            Some(rest) => first.chain(rest.listed()).boxed(),
            None => first.boxed(),
        }
    }
}

impl Split {
    fn listed(self) -> PageStream {
        let Split { first, children, level } = self;
        let parent = children.folder(String::new(), level);
        let further = stream::unfold(children, |mut children| async move {
            let page = children.children().await.transpose()?;
            Some((page, children))
        });
        let pages = stream::iter([Ok(first)]).chain(further);
        pages
            .map_ok(|page| stream::iter(page.into_iter().map(Ok)))
            .try_flatten()
            .map_ok(move |child| match child {
                Child::Object(object) => {
                    future::Either::Left(future::ready(Ok(Head::of(parent.listed_object(object)))))
                }
                Child::Folder(prefix) => {
                    future::Either::Right(in_background(parent.folder(prefix, level).head()))
                }
            })
            .try_buffered(FOLDERS_AT_ONCE)
            .map_ok(Head::listed)
            .try_flatten()
            .boxed()
    }
}

/// Begins to list a folder, also while nobody asks for its keys. It ends with the future.
fn in_background(
    head: impl Future<Output = Result<Head, OriginError>> + Send + 'static,
) -> impl Future<Output = Result<Head, OriginError>> {
    #[expect(clippy::disallowed_methods, reason = "the handle is its owner")]
    let task = AbortOnDropHandle::new(tokio::spawn(head.in_current_span()));
    async {
        task.await.unwrap_or_else(|e| match e.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(unavailable("a listing", "the program ends")),
        })
    }
}
