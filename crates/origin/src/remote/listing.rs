//! Lists a store page by page. Each page is a call with its own deadline and retries.
//!
//! Keys come in the order of the store, as the store has them. So a path may end in a slash (the marker of a
//! folder), or be no path at all.
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
use futures::StreamExt as _;
use futures::stream::BoxStream;
use object_store::list::PaginatedListOptions;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use tokio::time::timeout;

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

struct Pages {
    location: RemotePrefix,
    what: String,
    /// The prefix of the keys: empty, or ending in `/`.
    prefix: String,
    /// Where the next page begins. `None` after the last page.
    next: Option<Start>,
    /// The last key that was listed.
    last: Option<String>,
    /// Hashes of the tokens so far.
    tokens: HashSet<u64>,
    empty_pages: u32,
}

impl RemotePrefix {
    pub fn list(&self, what: String, prefix: &str) -> BoxStream<'static, Result<ObjectMeta, OriginError>> {
        let pages = Pages {
            location: self.clone(),
            what,
            prefix: self.key_prefix(prefix),
            next: Some(Start::First),
            last: None,
            tokens: HashSet::new(),
            empty_pages: 0,
        };
        let pages = futures::stream::unfold(pages, |mut pages| async move {
            let start = pages.next.take()?;
            let page = pages.page(start).await;
            Some((page, pages))
        });
        pages
            .flat_map(|page| match page {
                Ok(items) => futures::stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>()),
                Err(error) => futures::stream::iter(vec![Err(error)]),
            })
            .boxed()
    }

    /// Returns whether any key begins with the directory `prefix`, its own marker included.
    pub async fn has_below(&self, what: &str, prefix: &str) -> Result<bool, OriginError> {
        let prefix = self.key_prefix(prefix);
        let page = self.page_at(what, &prefix, &Start::First, 1).await?;
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
    async fn page_at(
        &self,
        what: &str,
        prefix: &str,
        start: &Start,
        keys: usize,
    ) -> Result<Page, OriginError> {
        let remote = &self.remote;
        let prefix = Some(prefix).filter(|prefix| !prefix.is_empty());
        remote
            .retried(what, 0, |_, at| async move {
                let store = at.store.pages().ok_or_else(|| {
                    OriginError::invalid(
                        what,
                        "a plain HTTP server has no listing; give the object names with --list FILE",
                    )
                })?;
                let mut options = PaginatedListOptions { max_keys: Some(keys), ..Default::default() };
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
    /// Reads one page and finds where the next one begins. An error ends the listing.
    async fn page(&mut self, start: Start) -> Result<Vec<ObjectMeta>, OriginError> {
        let what = self.what.as_str();
        let page = self.location.page_at(what, &self.prefix, &start, PAGE_KEYS).await?;
        let below = if self.location.prefix.is_empty() { 0 } else { self.location.prefix.len() + 1 };
        let last = page.objects.last().map(|object| object.path.clone());
        // The greatest key, whatever the order: so each page that follows a key brings a greater one.
        let greatest = page.objects.iter().map(|object| &object.path).max().cloned();
        let is_last_again = page.is_truncated != Some(true) && page.objects.len() == 1;
        if let Start::After(key) = &start
            && page.objects.iter().all(|object| object.path <= *key)
            && !(page.objects.is_empty() || is_last_again)
        {
            let why = format!(
                "a page is cut off after {key:?} and has no token for the next one, and the store does not \
                 go on after a key"
            );
            return Err(wrong_answer(what, why));
        }
        self.empty_pages = if page.objects.is_empty() { self.empty_pages + 1 } else { 0 };
        let mut items = Vec::with_capacity(page.objects.len());
        let mut before = self.last.take();
        for object in page.objects {
            let is_repeated = before.as_ref() == Some(&object.path);
            if !object.path.starts_with(&self.prefix) {
                return Err(outside(what, &self.prefix, &object.path));
            }
            before = Some(object.path.clone());
            // A cloud console makes a "folder" as an object whose key is the prefix itself. A page may begin
            // with the last key of the page before.
            if object.path.len() != self.prefix.len() && !is_repeated {
                items.push(listed(object, below));
            }
        }
        self.next = match (page.is_truncated, page.token) {
            // A token of a complete listing means nothing.
            (Some(false), _) | (None, None) => None,
            (_, Some(token)) => Some(Start::Token(token)),
            (Some(true), None) => match greatest.or(page.next_marker) {
                Some(key) => Some(Start::After(key)),
                None => {
                    let why = "an empty page says that more keys follow, and has no token for the next one";
                    return Err(wrong_answer(what, why));
                }
            },
        };
        self.last = last.or(before);
        self.check_progress()?;
        Ok(items)
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
