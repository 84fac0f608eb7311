//! The entries of a draft, and what was learned of them, as the indexer asks for them.

use crate::data::versions::{Sources, VersionError, Versions};
use async_trait::async_trait;
use fletch_api::LearnedFiles;
use fletch_core::Root;
use fletch_indexer::{
    failure::{Exit, Failure},
    run::learned::LearnedPages,
    source::draft::{DraftEntries, EntryPage},
};
use std::{fmt, sync::Arc};

/// A draft of this server.
pub struct DraftPages {
    pub versions: Arc<Versions>,
    pub sources: Arc<Sources>,
}

impl fmt::Debug for DraftPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DraftPages({})", self.sources.first.version.root())
    }
}

fn failure(e: &VersionError) -> Failure {
    let exit = if e.code().kind().retryable() { Exit::Unreachable } else { Exit::Failed };
    Failure::new(e.to_string()).hint(e.hint()).exit(exit)
}

impl DraftPages {
    fn check(&self) -> Result<(), Failure> {
        if self.sources.is_registered() {
            return Ok(());
        }
        Err(Failure::new(format!("dataset {} was unregistered", self.sources.dataset())))
    }
}

#[async_trait]
impl LearnedPages for DraftPages {
    async fn page(&self, after: u64) -> Result<LearnedFiles, Failure> {
        self.check()?;
        self.versions.learned_files(&self.sources, after).await.map_err(|e| failure(&e))
    }
}

#[async_trait]
impl DraftEntries for DraftPages {
    fn root(&self) -> Root {
        self.sources.first.version.root()
    }

    async fn page(&self, after: u64) -> Result<EntryPage, Failure> {
        self.check()?;
        let page = self.versions.draft_entries(&self.sources, after).await;
        let (entries, next) = page.map_err(|e| failure(&e))?;
        Ok(EntryPage { entries, next })
    }
}
