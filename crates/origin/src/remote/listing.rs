//! Lists a store page by page. Each page is a call with its own deadline and retries.
//!
//! Keys come in the order of the store, as the store has them. So a path may end in a slash (the marker of a
//! folder), or be no path at all. [`side_by_side`] lists the folders of a long listing at the same time.
//!
//! Invariants:
//! 1. A listing that ends without an error is whole. A page that says that more follows, and not how, is
//!    followed by the keys after its last one.
//! 2. A listing ends. A store that repeats a page, or sends empty pages without end, is an error.

use super::RemotePrefix;
use super::translate::{translate, unavailable, wrong_answer};
use crate::OriginError;
use crate::object::ObjectMeta;
use crate::transport::{CarriedPage, Page, Rewrite};
use futures::stream::BoxStream;
use futures::{StreamExt as _, future, stream};
use object_store::list::PaginatedListOptions;
use side_by_side::FoldersSeen;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use tokio::time::timeout;

mod side_by_side;

/// The number of keys in a page. Azure's default is 5,000.
const PAGE_KEYS: usize = 1000;

/// The most pages without a key, one after another. Stores send some where deleted objects were.
const EMPTY_PAGES_MAX: u32 = 1000;

/// Where a page begins.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Start {
    First,
    Token(String),
    /// After this key, at a store that gave no token.
    After(String),
}

/// A request for a page: the keys with a prefix from a start on.
struct Ask<'a> {
    /// Empty, or ending in `/`.
    prefix: &'a str,
    start: &'a Start,
    keys: usize,
    /// Whether keys with a further `/` are returned as their common prefixes.
    is_delimited: bool,
}

/// The pages of one prefix, one after another.
struct Pages {
    location: RemotePrefix,
    what: String,
    /// The prefix of the keys: empty, or ending in `/`.
    prefix: String,
    /// The prefix of the whole listing. An object with this key is the marker of its own folder.
    own_marker: String,
    /// Whether the pages have folders in place of the keys below them.
    is_delimited: bool,
    /// Where the next page begins. `None` after the last page.
    next: Option<Start>,
    /// The last key that was listed.
    last: Option<String>,
    /// Hashes of the tokens so far.
    tokens: HashSet<u64>,
    empty_pages: u32,
    /// Keys that were listed before, and are left out.
    known: Arc<HashSet<String>>,
    /// The folders of the pages so far. `None` where they are never listed side by side.
    seen: Option<FoldersSeen>,
}

impl RemotePrefix {
    pub fn list(&self, what: String, prefix: &str) -> BoxStream<'static, Result<ObjectMeta, OriginError>> {
        let seen = Some(FoldersSeen::at_level(0));
        let pages = Pages { seen, ..Pages::new(self.clone(), what, self.key_prefix(prefix)) };
        pages
            .listed()
            // An error ends the listing.
            .scan(false, |has_failed, page| {
                let page = (!*has_failed).then_some(page);
                *has_failed = matches!(page, Some(Err(_)));
                future::ready(page)
            })
            .flat_map(|page| match page {
                Ok(items) => stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>()),
                Err(error) => stream::iter(vec![Err(error)]),
            })
            .boxed()
    }

    /// Returns whether any key begins with the directory `prefix`, its own marker included.
    pub async fn has_below(&self, what: &str, prefix: &str) -> Result<bool, OriginError> {
        let prefix = self.key_prefix(prefix);
        let ask = Ask { prefix: &prefix, start: &Start::First, keys: 1, is_delimited: false };
        let page = self.page_at(what, ask).await?;
        match page.objects.iter().find(|object| !object.path.starts_with(&prefix)) {
            Some(other) => Err(outside(what, &prefix, &other.path)),
            None => Ok(!page.objects.is_empty()),
        }
    }

    /// Returns the prefix of the keys below a directory: empty, or ending in `/`.
    pub(super) fn key_prefix(&self, prefix: &str) -> String {
        let parts: Vec<&str> =
            [self.prefix.as_str(), prefix].into_iter().filter(|part| !part.is_empty()).collect();
        if parts.is_empty() { String::new() } else { format!("{}/", parts.join("/")) }
    }

    /// Reads one page.
    async fn page_at(&self, what: &str, ask: Ask<'_>) -> Result<Page, OriginError> {
        let remote = &self.remote;
        let Ask { start, keys, is_delimited, .. } = ask;
        let prefix = Some(ask.prefix).filter(|prefix| !prefix.is_empty());
        remote
            .retried(what, 0, |_, at| async move {
                let store = at.store.pages().ok_or_else(|| {
                    OriginError::invalid(
                        what,
                        "a plain HTTP server has no listing; give the object names with --list FILE",
                    )
                })?;
                let mut options = PaginatedListOptions { max_keys: Some(keys), ..Default::default() };
                options.delimiter = is_delimited.then_some("/".into());
                match start {
                    Start::First => {}
                    Start::Token(token) => options.page_token = Some(token.clone()),
                    Start::After(key) => {
                        // The second version of S3's listing reads the one, and the first version the other.
                        options.offset = Some(key.clone());
                        options.extensions.insert(Rewrite::Marker(key.clone()));
                    }
                }
                let page = timeout(remote.patience(), store.list_paginated(prefix, options)).await;
                let page = page
                    .map_err(|_| unavailable(what, "no listing page within a third of io_timeout"))?
                    .map_err(|e| translate(what, &e))?;
                let carried = page.result.extensions.get::<CarriedPage>().and_then(CarriedPage::take);
                carried.ok_or_else(|| wrong_answer(what, "the answer is no page of a listing"))
            })
            .await
    }
}

fn outside(what: &str, prefix: &str, key: &str) -> OriginError {
    wrong_answer(what, format!("the listing of {prefix:?} contains {key:?}"))
}

impl Pages {
    /// Begins before the first page.
    fn new(location: RemotePrefix, what: String, prefix: String) -> Self {
        Pages {
            location,
            what,
            own_marker: prefix.clone(),
            prefix,
            is_delimited: false,
            next: Some(Start::First),
            last: None,
            tokens: HashSet::new(),
            empty_pages: 0,
            known: Arc::default(),
            seen: None,
        }
    }

    /// Returns the keys of the next page, with their paths below the origin. `None` after the last page.
    async fn keys(&mut self) -> Result<Option<Vec<ObjectMeta>>, OriginError> {
        let Some(page) = self.next_page().await? else { return Ok(None) };
        if let Some(seen) = &mut self.seen {
            seen.add(&self.prefix, &page);
        }
        let below = self.location.key_prefix("").len();
        let new = page.objects.into_iter().filter(|object| !self.known.contains(&object.path));
        Ok(Some(new.map(|object| listed(object, below)).collect()))
    }

    /// Reads the next page, and finds where the one after it begins. `None` after the last page.
    ///
    /// The page has no key outside the prefix, and not the marker of the folder that is listed.
    async fn next_page(&mut self) -> Result<Option<Page>, OriginError> {
        let Some(start) = self.next.take() else { return Ok(None) };
        let what = self.what.as_str();
        let (prefix, is_delimited) = (self.prefix.as_str(), self.is_delimited);
        let ask = Ask { prefix, start: &start, keys: PAGE_KEYS, is_delimited };
        let mut page = self.location.page_at(what, ask).await?;
        if !is_delimited {
            page.prefixes.clear();
        }
        let names = || page.objects.iter().map(|object| &object.path).chain(&page.prefixes);
        if let Some(other) = names().find(|name| !name.starts_with(prefix)) {
            return Err(outside(what, prefix, other));
        }
        // The greatest key, whatever the order: so each page that follows a key brings a greater one.
        let greatest = names().max().cloned();
        let is_empty = greatest.is_none();
        let is_last_again = page.is_truncated != Some(true) && names().count() == 1;
        if let Start::After(key) = &start
            && names().all(|name| name <= key)
            && !(is_empty || is_last_again)
        {
            let why = format!(
                "a page is cut off after {key:?} and has no token for the next one, and the store does not \
                 go on after a key"
            );
            return Err(wrong_answer(what, why));
        }
        self.empty_pages = if is_empty { self.empty_pages + 1 } else { 0 };
        let last = page.objects.last().map(|object| object.path.clone());
        let mut before = self.last.take();
        page.objects.retain(|object| {
            let is_repeated = before.as_ref() == Some(&object.path);
            before = Some(object.path.clone());
            // A cloud console makes a "folder" as an object whose key is the prefix itself. A page may begin
            // with the last key of the page before.
            !is_repeated && object.path != self.own_marker
        });
        self.next = match (page.is_truncated, page.token.take()) {
            // A token of a complete listing means nothing.
            (Some(false), _) | (None, None) => None,
            (_, Some(token)) => Some(Start::Token(token)),
            (Some(true), None) => match greatest.or(page.next_marker.take()) {
                Some(key) => Some(Start::After(key)),
                None => {
                    let why = "an empty page says that more keys follow, and has no token for the next one";
                    return Err(wrong_answer(what, why));
                }
            },
        };
        self.last = last.or(before);
        self.check_progress()?;
        Ok(Some(page))
    }

    /// Checks that the listing can end: no token comes twice, and not every page is empty.
    fn check_progress(&mut self) -> Result<(), OriginError> {
        if self.next.is_some() && self.empty_pages > EMPTY_PAGES_MAX {
            let why = format!("the store sent {EMPTY_PAGES_MAX} empty pages, one after another, and no end");
            return Err(wrong_answer(&self.what, why));
        }
        let Some(Start::Token(token)) = &self.next else { return Ok(()) };
        let mut hasher = DefaultHasher::new();
        token.hash(&mut hasher);
        if self.tokens.insert(hasher.finish()) {
            return Ok(());
        }
        Err(wrong_answer(
            &self.what,
            "two pages have the same token for the next page, so the listing has no end",
        ))
    }
}

/// Returns an object of a page with its path below the origin, and its entity tag in the form of a header.
fn listed(object: ObjectMeta, below: usize) -> ObjectMeta {
    let path = object.path[below..].to_owned();
    let is_quoted = |tag: &str| tag.ends_with('"') && (tag.starts_with('"') || tag.starts_with("W/\""));
    // Azure and some other stores quote entity tags in headers and not in listings.
    let etag = object.etag.map(|tag| match is_quoted(&tag) {
        true => tag,
        false => format!("\"{}\"", tag.trim_matches('"')),
    });
    ObjectMeta { path, etag, ..object }
}
