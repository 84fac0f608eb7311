//! How this process names itself as a rank of a job (`docs/EPOCHS.md`, "Loaders").

use crate::ClientError;
use fletch_api::{Loader, loaders::LOADER_HOST_MAX};
use std::{
    os::unix::process::parent_id,
    process::id,
    sync::{Arc, OnceLock},
    time::{SystemTime, UNIX_EPOCH},
};

/// The file with the name of this host.
const HOST_FILE: &str = "/proc/sys/kernel/hostname";

/// A loader, as this process sends it.
#[derive(Debug)]
pub(super) struct OwnLoader {
    loader: Loader,
    /// In a worker: the process that was its parent when it made this value.
    parent: Option<u32>,
}

impl OwnLoader {
    pub(super) fn new(loader: Loader) -> Self {
        let parent = (loader.pid != id()).then(parent_id);
        OwnLoader { loader, parent }
    }

    /// Returns the loader of all handles of this process that were given no other.
    pub(super) fn of_process() -> Arc<Self> {
        static OF_PROCESS: OnceLock<Arc<OwnLoader>> = OnceLock::new();
        Arc::clone(OF_PROCESS.get_or_init(|| Arc::new(OwnLoader::new(new_loader()))))
    }

    /// Returns the loader for a request.
    ///
    /// # Errors
    /// [`ClientError::Config`] in a worker whose parent, or the process that it works for, has ended: its
    /// requests would look like signs of life of that process, and keep its successor out.
    pub(super) fn for_request(&self) -> Result<Loader, ClientError> {
        match self.parent {
            Some(parent) if parent != parent_id() || self.has_ended() => Err(ClientError::Config(format!(
                "process {}, for which this worker reads, has ended; the worker sends no more requests",
                self.loader.pid
            ))),
            _ => Ok(self.loader.clone()),
        }
    }

    /// Returns whether the loader's process ran on this host and has ended.
    ///
    /// A worker that starts late may never see its parent.
    fn has_ended(&self) -> bool {
        if self.loader.host != host_name() || std::fs::metadata("/proc/self").is_err() {
            return false;
        }
        match std::fs::read_to_string(format!("/proc/{}/stat", self.loader.pid)) {
            // The state follows the name, which is in parentheses and may contain some.
            Ok(stat) => match stat.rsplit_once(") ") {
                Some((_, rest)) => rest.starts_with(['Z', 'X']),
                None => false,
            },
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    pub(super) fn loader(&self) -> &Loader {
        &self.loader
    }
}

/// Returns the name of this host, in the form that a loader may have.
fn host_name() -> String {
    let named = std::fs::read_to_string(HOST_FILE).unwrap_or_default();
    let mut host: String = named.trim().chars().filter(|c| !c.is_control()).collect();
    while host.len() > LOADER_HOST_MAX {
        host.pop();
    }
    if host.is_empty() {
        "unknown".clone_into(&mut host);
    }
    host
}

/// Returns a loader with a new id for this process.
fn new_loader() -> Loader {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Loader {
        id: format!("{:032x}", rand::random::<u128>()),
        host: host_name(),
        pid: id(),
        since_ms: u64::try_from(now.as_millis()).unwrap_or(0),
        take_over: false,
        leave: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_valid_loader() {
        let one = OwnLoader::of_process();
        one.loader.check().expect("valid");
        assert_eq!(one.loader, OwnLoader::of_process().loader);
        assert_ne!(new_loader().id, new_loader().id);
        assert_eq!(one.for_request().expect("it lives").pid, id());
    }

    #[test]
    fn a_worker_without_its_parent_asks_for_nothing() {
        let mut worker = OwnLoader::new(Loader { pid: parent_id(), ..new_loader() });
        worker.for_request().expect("its parent lives");
        worker.parent = Some(0);
        let error = worker.for_request().expect_err("its parent has ended");
        assert!(error.to_string().contains("has ended"), "{error}");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let late = OwnLoader::new(Loader { pid: child.id(), ..new_loader() });
        child.wait().expect("it ended");
        late.for_request().expect_err("it started late");
        let far = Loader { pid: child.id(), host: "another-host".to_owned(), ..new_loader() };
        OwnLoader::new(far).for_request().expect("nobody can tell from here");
    }
}
