//! How a job leaves the registry: it is deleted, or its files are set aside.

use super::{JobError, OpenJob, Registry};
use fletch_core::{Domain, Tenant};
use fletch_host::replace::sync_parent;
use std::{path::Path, sync::Arc};
use tokio::task::spawn_blocking;

/// The directory of jobs that another server of the cluster has now, beside the one of this server's jobs.
const ASIDE_DIR: &str = "jobs-aside";

impl Registry {
    /// Deletes a job and its ledgers.
    ///
    /// # Errors
    /// [`JobError::NotFound`], [`JobError::Io`].
    pub async fn delete(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<(), JobError> {
        let permit = self.permit_to_change(id).await;
        let registered = self.registered(domain, tenant, id)?;
        let (from, to) = (self.dir.join(id), self.dir.join(format!("gone-{id}")));
        let (jobs, id) = (Arc::clone(&self.jobs), id.to_owned());
        // The deletion goes on if the caller goes away: a job that is closed and still there would reject
        // everything.
        let task = self.context.tasks.spawn(async move {
            let _permit = permit;
            // No new request finds the job; an opening under way ends first.
            jobs.lock().remove(&id);
            let none = || async { Err::<Arc<OpenJob>, _>(JobError::NotFound) };
            if let Ok(opened) = registered.opened.get_or_try_init(none).await {
                opened.close().await;
            }
            let there = from.clone();
            let gone = spawn_blocking(move || {
                let failed = |error| JobError::Io { path: from.clone(), error };
                // An earlier deletion could not remove this.
                remove_all(&to).and_then(|()| std::fs::rename(&from, &to)).map_err(failed)?;
                let synced = from.parent().map_or(Ok(()), |dir| std::fs::File::open(dir)?.sync_all());
                if let Err(error) = synced {
                    // A crash could undo the rename. Move the job back, so that the directory agrees with
                    // the error that the caller gets.
                    return std::fs::rename(&to, &from).and(Err(error)).map_err(failed);
                }
                if let Err(error) = remove_all(&to) {
                    tracing::warn!(
                        dir = %to.display(), %error,
                        "a deleted job leaves files; the next start removes them"
                    );
                }
                Ok(())
            });
            let gone = gone.await.map_err(|_| JobError::TaskLost)?;
            if gone.is_err() && there.exists() {
                // The job is still there, and requests see that: nothing declares it anew over its old
                // ledgers.
                jobs.lock().insert(id, registered.closed(registered.known.clone()));
            }
            gone
        });
        task.await.map_err(|_| JobError::TaskLost)?
    }

    /// Takes a job out of service and moves its files to the directory `jobs-aside`, which nothing reads.
    ///
    /// # Errors
    /// [`JobError::Io`]; the job is still there.
    pub async fn set_aside(&self, id: &str) -> Result<(), JobError> {
        let _permit = self.permit_to_change(id).await;
        let Some(registered) = self.jobs.lock().remove(id) else { return Ok(()) };
        let none = || async { Err::<Arc<OpenJob>, _>(JobError::NotFound) };
        if let Ok(opened) = registered.opened.get_or_try_init(none).await {
            opened.close().await;
        }
        let (from, to) = (self.dir.join(id), self.dir.with_file_name(ASIDE_DIR));
        let moved = spawn_blocking(move || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let place = to.join(format!("{name}-{}", now.as_millis()));
            let failed = |error| JobError::Io { path: from.clone(), error };
            std::fs::create_dir_all(&to).and_then(|()| std::fs::rename(&from, &place)).map_err(failed)?;
            sync_parent(&from).and_then(|()| sync_parent(&place)).map_err(failed)?;
            tracing::info!(dir = %place.display(), "the ledgers of a job lie here now");
            Ok(())
        });
        let moved = moved.await.map_err(|_| JobError::TaskLost)?;
        if moved.is_err() && self.dir.join(id).exists() {
            self.jobs.lock().insert(id.to_owned(), registered.closed(registered.known.clone()));
        }
        moved
    }
}

/// Removes a directory, if it exists. Blocking.
pub(super) fn remove_all(dir: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
