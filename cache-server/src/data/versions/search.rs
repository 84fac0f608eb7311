//! Searches a domain's datasets for the sources of a root. Readers of the root share one search.
//!
//! A search gives its sources as it finds them, so that no reader waits for the slowest dataset. It skips
//! homes that are left alone, and keeps the sources that an earlier search found there.

use super::{Source, Sources, VersionError, Versions};
use fletch_core::{Domain, Root};
use futures::StreamExt as _;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// A fresh search is at most this old.
const FRESH_TTL: Duration = Duration::from_secs(2);
/// How long a reader waits for further sources when it has one.
const MORE_WITHIN: Duration = Duration::from_millis(300);

/// The sources of a root that were found so far.
#[derive(Clone, Default)]
struct Progress {
    found: Vec<Arc<Source>>,
    done: bool,
}

/// The latest search for the sources of a root in a domain.
#[derive(Default)]
pub(super) struct Searches(Mutex<Option<Search>>);

#[derive(Clone)]
struct Search {
    begun: Instant,
    progress: watch::Receiver<Progress>,
}

/// Sources of a root that a reader has not seen, and whether there are no others.
pub(super) struct NewSources {
    pub sources: Vec<Arc<Source>>,
    pub all: bool,
}

impl Versions {
    /// Returns the latest search, or starts one. `fresh` repeats a search that is older than [`FRESH_TTL`].
    fn search(self: &Arc<Self>, domain: &Domain, root: Root, fresh: bool) -> Search {
        let searches = self.searches.get_with((domain.clone(), root), Arc::default);
        let mut latest = searches.0.lock();
        if let Some(search) = &*latest {
            let running = !search.progress.borrow().done;
            if running || !fresh || search.begun.elapsed() < FRESH_TTL {
                return search.clone();
            }
        }
        let known = latest.as_ref().map(|s| s.progress.borrow().found.clone()).unwrap_or_default();
        let open = self.open.iter().filter(|(key, _)| key.0 == *domain && key.1 == root);
        let open: Vec<_> = open.filter_map(|(_, slot)| Some(Arc::clone(&slot.get()?.first))).collect();
        let (sender, progress) = watch::channel(Progress::default());
        let search = Search { begun: Instant::now(), progress };
        *latest = Some(search.clone());
        let (versions, domain) = (Arc::clone(self), domain.clone());
        self.tasks.spawn(async move {
            versions.run_search(&domain, root, (open, known), &sender).await;
            sender.send_modify(|p| p.done = true);
        });
        search
    }

    async fn run_search(
        self: &Arc<Self>,
        domain: &Domain,
        root: Root,
        (open, known): (Vec<Arc<Source>>, Vec<Arc<Source>>),
        sender: &watch::Sender<Progress>,
    ) {
        let add = |source: Arc<Source>| {
            sender.send_modify(|p| {
                if !p.found.iter().any(|s| s.is_same(&source)) {
                    p.found.push(source);
                }
            });
        };
        // What a reader opened needs no search.
        open.into_iter().filter(|source| source.is_registered()).for_each(add);
        let all = self.registrations.list(domain);
        let (ask, skip): (Vec<_>, Vec<_>) = all.into_iter().partition(|entry| self.may_ask(entry, root));
        for source in known {
            if source.is_registered() && skip.iter().any(|entry| Arc::ptr_eq(entry, &source.registered)) {
                add(source);
            }
        }
        let mut scan = Box::pin(self.scan(ask, root));
        while let Some((_, found)) = scan.next().await {
            match found {
                Ok(found) => found.into_iter().for_each(add),
                Err(e) => tracing::debug!(error = %e, "cannot search a dataset for another source"),
            }
        }
    }

    /// Returns the sources of a root that `seen` does not have, once there is one or there are no others.
    pub(super) async fn new_sources(
        self: &Arc<Self>,
        sources: &Sources,
        fresh: bool,
        seen: &[Arc<Source>],
    ) -> NewSources {
        let search = self.search(&sources.domain, sources.root, fresh);
        let mut progress = search.progress.clone();
        let is_new = |s: &Arc<Source>| s.is_registered() && !seen.iter().any(|old| old.is_same(s));
        let enough = progress.wait_for(|p| p.done || p.found.iter().any(is_new)).await.is_ok();
        if enough {
            // Other layouts of the same dataset follow soon, and some are better than the first.
            let wait = progress.wait_for(|p| p.done);
            drop(timeout_at(search.begun + MORE_WITHIN, wait).await);
        }
        let now = progress.borrow();
        let sources = now.found.iter().filter(|s| is_new(s)).cloned().collect();
        // A search whose task was lost finds nothing more.
        NewSources { sources, all: now.done || !enough }
    }

    /// Returns the first source of a root for which `wanted` holds, from the latest search or a fresh one.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] if there is none.
    pub(super) async fn search_for(
        self: &Arc<Self>,
        sources: &Sources,
        wanted: impl Fn(&Source) -> bool,
    ) -> Result<Arc<Source>, VersionError> {
        let is_wanted = |s: &Arc<Source>| s.is_registered() && wanted(s);
        for fresh in [false, true] {
            let mut progress = self.search(&sources.domain, sources.root, fresh).progress;
            let ended = progress.wait_for(|p| p.done || p.found.iter().any(is_wanted)).await;
            let found = ended.ok().and_then(|p| {
                // A healthy home before one that is left alone.
                let mut fit: Vec<_> = p.found.iter().filter(|s| is_wanted(s)).collect();
                fit.sort_by_key(|s| !s.tables.home().is_healthy());
                fit.first().map(|s| Arc::clone(s))
            });
            if let Some(found) = found {
                return Ok(found);
            }
        }
        Err(VersionError::NotFound)
    }
}
