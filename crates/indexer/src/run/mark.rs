//! Marks of the runs that write at a tables location, so that a collection deletes nothing that they rely on.
//!
//! A run finds tables and chunks of earlier runs, and writes them no second time. `fletch gc` must not delete
//! them in between. So a run writes its mark before it looks at anything, and then waits while a collection
//! has one. A collection writes its mark before it looks for runs, and gives way to any. Whichever began
//! first, one of the two sees the other.
//!
//! A mark is renewed while its run lives. One that was not for [`LIVES`], by the clock of the store, was left
//! by a run that was killed. A run whose machine slept for so long, or whose store was away, must not publish
//! what it found before ([`Mark::check`]).

use crate::failure::Failure;
use crate::out::Out;
use crate::run::now_ns;
use crate::tables_location::{TablesLocation, remove_empty_dirs};
use fletch_core::Hash;
use fletch_origin::{ObjectMeta, Origin, OriginError, PutMode};
use fletch_tables::paths;
use futures::TryStreamExt as _;
use parking_lot::Mutex;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

/// How long after its last renewal a mark still counts.
pub const LIVES: Duration = Duration::from_secs(1800);
/// How often a mark is renewed.
const RENEWED_EVERY: Duration = Duration::from_secs(300);
/// How often a run looks whether a collection has ended.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The content of a mark, for people who find one.
#[derive(Serialize)]
struct MarkDoc<'a> {
    tool: &'a str,
    host: &'a str,
    pid: u32,
}

/// A mark that is there, and renewed, until [`Mark::remove`].
///
/// Dropped without it, the mark stays and counts for [`LIVES`], as that of a run that was killed.
#[derive(Debug)]
pub struct Mark {
    origin: Origin,
    path: String,
    renewed: Arc<Mutex<Renewed>>,
    _renewal: AbortOnDropHandle<()>,
}

/// When a mark was renewed. By the time of day, which goes on while the machine sleeps.
#[derive(Debug)]
struct Renewed {
    last: SystemTime,
    /// Whether there ever was a pause after which others may have taken the run for dead.
    has_lapsed: bool,
}

impl Renewed {
    /// Whether others may take the run for dead, or may have.
    fn lapsed(&mut self) -> bool {
        let pause = self.last.elapsed().unwrap_or_default();
        self.has_lapsed |= pause + RENEWED_EVERY > LIVES;
        self.has_lapsed
    }
}

impl Mark {
    /// Marks that a run writes at a location, and waits until no collection is under way there.
    ///
    /// # Errors
    /// [`Failure`] when the location cannot be written, or `stop` was set.
    pub async fn of_run(tables: &TablesLocation, out: Out, stop: &AtomicBool) -> Result<Self, Failure> {
        let mark = Mark::write(tables.origin(), paths::run(&new_id())).await?;
        let mut is_noted = false;
        while mark.sees(paths::COLLECTION).await? {
            if !std::mem::replace(&mut is_noted, true) {
                out.note(format_args!("waiting for `fletch gc`, which deletes at {}", tables.uri()));
            }
            if let Err(stopped) = Failure::if_stopped(stop) {
                mark.remove(out).await;
                return Err(stopped);
            }
            sleep(LOOKS_EVERY).await;
        }
        Ok(mark)
    }

    /// Marks a collection at a location where no run writes.
    ///
    /// # Errors
    /// [`Failure`] if a run or another collection has a mark there, or the location cannot be written.
    pub async fn of_collection(tables: &TablesLocation, out: Out) -> Result<Vec<Self>, Failure> {
        let origin = tables.origin();
        // Also what another collection sees of this one, and what shows the time of the store.
        let own = Mark::write(origin, paths::run(&new_id())).await?;
        let other = match own.sees(paths::COLLECTION).await {
            Ok(true) => Some("another `fletch gc`".to_owned()),
            Ok(false) => None,
            Err(e) => return Err(own.given_up(e, out).await),
        };
        if let Some(other) = other {
            return Err(own.given_up(at_work(tables, &other), out).await);
        }
        let collection = match Mark::write(origin, paths::COLLECTION.to_owned()).await {
            Ok(mark) => mark,
            Err(e) => return Err(own.given_up(e, out).await),
        };
        let failure = match own.other_run().await {
            Ok(None) => return Ok(vec![own, collection]),
            Ok(Some(run)) => at_work(tables, &format!("a run that writes ({run})")),
            Err(e) => e,
        };
        collection.remove(out).await;
        Err(own.given_up(failure, out).await)
    }

    async fn write(origin: &Origin, path: String) -> Result<Self, Failure> {
        let tool = concat!("fletch ", env!("CARGO_PKG_VERSION"));
        let host = nix::unistd::gethostname().unwrap_or_default();
        let doc = MarkDoc { tool, host: &host.to_string_lossy(), pid: std::process::id() };
        let bytes = serde_json::to_vec(&doc).map_err(|e| Failure::new(format!("a mark: {e}")))?;
        let renewed = Arc::new(Mutex::new(Renewed { last: SystemTime::now(), has_lapsed: false }));
        origin.put(&path, bytes.clone().into(), PutMode::Overwrite).await?;
        let (store, at, of) = (origin.clone(), path.clone(), Arc::clone(&renewed));
        #[expect(clippy::disallowed_methods, reason = "the handle is its owner")]
        let renewal = tokio::spawn(async move {
            loop {
                sleep(RENEWED_EVERY).await;
                let now = SystemTime::now();
                // A failed renewal is made up for by the next one, unless too many fail.
                let put = store.put(&at, bytes.clone().into(), PutMode::Overwrite).await;
                let mut of = of.lock();
                if !of.lapsed() && put.is_ok() {
                    of.last = now;
                }
            }
        });
        Ok(Mark { origin: origin.clone(), path, renewed, _renewal: AbortOnDropHandle::new(renewal) })
    }

    /// Checks that no collection can have taken the run for dead since it wrote the mark.
    ///
    /// # Errors
    /// [`Failure`] if one can: what the run found may be gone.
    pub fn check(&self) -> Result<(), Failure> {
        if !self.renewed.lock().lapsed() {
            return Ok(());
        }
        Err(Failure::new("the run paused for so long that `fletch gc` may have deleted what it relies on")
            .hint("run the same command again: it looks at everything anew, and goes on where it stopped"))
    }

    /// Whether there is a mark at a path, and its run lives.
    async fn sees(&self, path: &str) -> Result<bool, Failure> {
        match self.origin.head(path).await {
            Ok(other) => self.lives(&other).await,
            Err(OriginError::NotFound { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Whether the run of another mark lives.
    async fn lives(&self, other: &ObjectMeta) -> Result<bool, Failure> {
        let now = self.origin.head(&self.path).await?.mtime_ns;
        let age = now.zip(other.mtime_ns).map(|(now, at)| now.saturating_sub(at));
        Ok(age.is_none_or(|age| i128::from(age) < LIVES.as_nanos().cast_signed()))
    }

    /// Returns the path of another run's mark, if there is one whose run lives.
    async fn other_run(&self) -> Result<Option<String>, Failure> {
        let mut marks = self.origin.list(paths::RUNS);
        while let Some(other) = marks.try_next().await? {
            let is_own = other.path == self.path || other.path == paths::COLLECTION;
            if !is_own && self.lives(&other).await? {
                return Ok(Some(other.path));
            }
        }
        Ok(None)
    }

    /// Removes the mark. One that cannot be removed counts for [`LIVES`].
    pub async fn remove(self, out: Out) {
        let Mark { origin, path, _renewal: renewal, .. } = self;
        drop(renewal);
        match origin.delete(&path).await {
            Ok(()) => remove_empty_dirs(&origin, &path),
            Err(e) => out.note(format_args!("the mark {path} stays for half an hour: {e}")),
        }
    }

    async fn given_up(self, failure: Failure, out: Out) -> Failure {
        self.remove(out).await;
        failure
    }
}

/// Returns a name for a mark that no other run has.
fn new_id() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let id = format!("{}\0{}\0{}", host.to_string_lossy(), std::process::id(), now_ns());
    Hash::of(id.as_bytes()).short()
}

fn at_work(tables: &TablesLocation, other: &str) -> Failure {
    Failure::new(format!("{other} is at work at {}; nothing was deleted", tables.uri()))
        .hint("run the command again when it has ended; a killed one counts for half an hour")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_slept_has_lapsed_for_good() {
        let ago = |pause| Renewed { last: SystemTime::now() - pause, has_lapsed: false };
        assert!(!ago(RENEWED_EVERY * 2).lapsed());
        let mut slept = ago(LIVES - RENEWED_EVERY + Duration::from_secs(1));
        assert!(slept.lapsed());
        slept.last = SystemTime::now();
        assert!(slept.lapsed(), "a later renewal does not bring back what was deleted meanwhile");
    }
}
