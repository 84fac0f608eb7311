//! Lists a store page by page. Each page is a call with its own deadline and retries.

use super::RemotePrefix;
use super::translate::{translate, unavailable, wrong_answer};
use crate::OriginError;
use crate::object::ObjectMeta;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use object_store::list::PaginatedListOptions;
use tokio::time::timeout;

/// The number of keys in a page. Azure's default is 5,000.
const PAGE_KEYS: usize = 1000;

struct Pages {
    location: RemotePrefix,
    what: String,
    /// The prefix of the keys: empty, or ending in `/`.
    prefix: String,
    /// The token of the next page. `None` after the last page.
    next: Option<Option<String>>,
    /// The last path that was listed. The next path must be greater.
    last: String,
}

impl RemotePrefix {
    pub fn list(&self, what: String, prefix: String) -> BoxStream<'static, Result<ObjectMeta, OriginError>> {
        let parts: Vec<&str> =
            [self.prefix.as_str(), prefix.as_str()].into_iter().filter(|p| !p.is_empty()).collect();
        let prefix = if parts.is_empty() { String::new() } else { format!("{}/", parts.join("/")) };
        let pages = Pages { location: self.clone(), what, prefix, next: Some(None), last: String::new() };
        let pages = futures::stream::unfold(pages, |mut pages| async move {
            let token = pages.next.take()?;
            let page = pages.page(token).await;
            Some((page, pages))
        });
        pages
            .flat_map(|page| match page {
                Ok(items) => futures::stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>()),
                Err(error) => futures::stream::iter(vec![Err(error)]),
            })
            .boxed()
    }
}

impl Pages {
    /// Reads one page. An error ends the listing.
    async fn page(&mut self, token: Option<String>) -> Result<Vec<ObjectMeta>, OriginError> {
        let remote = &self.location.remote;
        let what = self.what.as_str();
        let prefix = Some(self.prefix.as_str()).filter(|p| !p.is_empty());
        let token = &token;
        let page = remote
            .retried(what, 0, |_, at| async move {
                let store = at.store.pages().ok_or_else(|| {
                    OriginError::invalid(
                        what,
                        "a plain HTTP server has no listing; give the object names with --list FILE",
                    )
                })?;
                let options = PaginatedListOptions {
                    page_token: token.clone(),
                    max_keys: Some(PAGE_KEYS),
                    ..Default::default()
                };
                let page = timeout(remote.patience(), store.list_paginated(prefix, options)).await;
                page.map_err(|_| unavailable(what, "no listing page within a third of io_timeout"))?
                    .map_err(|e| translate(what, &e))
            })
            .await?;
        let below = if self.location.prefix.is_empty() { 0 } else { self.location.prefix.len() + 1 };
        let mut items = Vec::with_capacity(page.result.objects.len());
        for object in &page.result.objects {
            let key = object.location.as_ref();
            // A cloud console makes a "folder" as an object whose key is the prefix itself.
            if key.len() + 1 == self.prefix.len() {
                continue;
            }
            let path = key.get(below..).filter(|_| key.starts_with(&self.prefix));
            let path = path.ok_or_else(|| {
                wrong_answer(what, format!("the listing of {:?} contains {key:?}", self.prefix))
            })?;
            if path <= self.last.as_str() {
                return Err(wrong_answer(
                    what,
                    format!("the listing is not sorted: {path:?} comes after {:?}", self.last),
                ));
            }
            path.clone_into(&mut self.last);
            items.push(remote.meta_of(path, object));
        }
        self.next = page.page_token.map(Some);
        Ok(items)
    }
}
