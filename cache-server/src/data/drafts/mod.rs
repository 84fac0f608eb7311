//! Drafts: lists datasets, and makes versions of what was listed.
//!
//! ```text
//! a URI alone ─▶ `listings`: one thread a dataset lists it ─▶ tables of a draft, at the server's place
//!
//! asked, or every byte was learned ─▶ `seals`: one thread a draft, over the entries of the draft
//!                                     ├ known by their places ─▶ no request, no byte
//!                                     └ the rest ─▶ read from the origin, pinned, few at once
//!                                  ─▶ tables beside those of the draft ─▶ the tag, if it names the draft
//! ```
//! 1. A seal lists nothing: its entries are those of the draft. An object that changed or vanished blocks it,
//!    and nothing is left out.
//! 2. (I5) The journals are in the state directory. What was read is not read again after a restart.
//! 3. (I6) Two seals and two listings run at once, some wait, and the last ones are remembered.
//! 4. (I7) They belong to the domain of their dataset. Places are checked again before each.
//! 5. The tables of a version go to where those of its draft are, by the credentials with which the server
//!    reads them.

mod known;
mod listings;
mod pages;
mod run;
mod seals;

pub use listings::{Listings, TooManyListings};
pub use seals::{SealContext, SealError, Seals};

use crate::{data::versions::UriNotAllowed, tenancy::state::RegistrationHandle};
use fletch_api::{Code, Problem};
use fletch_core::{DatasetName, Domain};
use fletch_indexer::{
    failure::{Exit, Failure},
    index,
    out::{Notes, Out},
    run::{
        Counters, RunContext,
        options::{RunFailure, RunOptions, RunReport},
    },
};
use fletch_origin::OriginUri;
use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{SystemTime, UNIX_EPOCH},
};
use tokio::{runtime::Handle, sync::oneshot};

/// A dataset whose last listing or seal here made no version.
#[derive(Debug, Clone)]
pub struct FailedRefresh {
    pub domain: Domain,
    pub dataset: DatasetName,
    /// Why.
    pub problem: Problem,
}

fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Where a run about a dataset reads and writes.
struct RunPlaces {
    objects: OriginUri,
    tables: OriginUri,
    /// The journals and temporary tables. (I7) Each dataset of each domain has a directory of its own, so
    /// that no run meets the lock or the journal of another domain.
    scratch: PathBuf,
}

impl RunPlaces {
    /// Checks anew that the domain may use the places: the settings may have changed since the registration.
    async fn of(context: &SealContext, entry: &Arc<RegistrationHandle>) -> Result<Self, Failure> {
        let (versions, of) = (Arc::clone(&context.versions), Arc::clone(entry));
        let checked = tokio::task::spawn_blocking(move || {
            let check = |text: &str| versions.allowed().check(&of.domain, text);
            Ok::<_, UriNotAllowed>((check(&of.dataset.uri)?, check(&of.dataset.tables)?))
        });
        let checked = checked.await.map_err(|e| Failure::new(format!("a task was lost: {e}")))?;
        let (objects, tables) = checked.map_err(|e| Failure::new(e.to_string()).exit(Exit::Denied))?;
        let scratch = context.dir.join(entry.domain.as_str()).join(entry.dataset.name.as_str());
        Ok(RunPlaces { objects, tables, scratch })
    }
}

/// Runs the indexer on a thread of its own, because it blocks.
async fn index_on_a_thread(
    context: &SealContext,
    options: RunOptions,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
) -> Result<RunReport, RunFailure> {
    let (origins, rt, (done, made)) = (context.origins.clone(), Handle::current(), oneshot::channel());
    let work = move || {
        let out = Out { json: false, quiet: true, notes: Notes::Log };
        let ctx = RunContext { origins: &origins, rt: &rt, out, stop: &stop, counters: &counters };
        // Nobody waits any more if the server stops.
        let _nobody = done.send(index::run(&options, ctx));
    };
    let thread = std::thread::Builder::new().name("indexer".to_owned()).spawn(work);
    thread.map_err(|e| Failure::io("cannot start a thread", &e))?;
    match made.await {
        Ok(made) => made,
        Err(_) => Err(Failure::new("the thread of the indexer was lost").into()),
    }
}

/// Returns the problem of a failed run. Its own hint is for who gave the command `fletch index`.
fn problem_of(failure: Failure, hint: String) -> Problem {
    let hint = match failure.exit {
        Exit::NoSpace => {
            "free some space on the disk of the server's state directory, and try again".to_owned()
        }
        _ => hint,
    };
    let code = match failure.exit {
        Exit::Denied => Code::OriginDenied,
        Exit::Unreachable => Code::OriginUnavailable,
        Exit::Interrupted => Code::NotReady,
        _ => Code::Internal,
    };
    Problem::new(code, failure.what, hint)
}
