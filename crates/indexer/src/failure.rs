//! How a command ends: an exit code; after a failure also what happened, to what, and what to do next.

use fletch_client::ClientError;
use fletch_client::fallback::RememberedVersionError;
use fletch_client::server_choice::ServerChoiceError;
use fletch_core::Kind;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What to do about a full disk.
const FREE_SPACE: &str = "free some space, or give another --state-dir or --tables";

/// The exit codes. Scripts rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The command did everything.
    Ok = 0,
    /// The command failed.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The command did a part and listed the rest.
    Partial = 3,
    /// A server or an origin cannot be reached.
    Unreachable = 4,
    /// Access was denied.
    Denied = 5,
    /// A disk of this machine or of the server is full, or a quota on it is used up.
    NoSpace = 6,
    /// Ctrl-C or SIGTERM stopped the command.
    Interrupted = 130,
}

impl Exit {
    /// Returns the code in `--json` output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Exit::Ok => "ok",
            Exit::Failed => "failed",
            Exit::Usage => "usage",
            Exit::Partial => "partial",
            Exit::Unreachable => "unreachable",
            Exit::Denied => "denied",
            Exit::NoSpace => "no_space",
            Exit::Interrupted => "interrupted",
        }
    }
}

/// The failure of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// What happened, with the path or address.
    pub what: String,
    /// What to do next.
    pub hint: Option<String>,
}

impl Failure {
    /// Returns a failure with exit code 1.
    pub fn new(what: impl Into<String>) -> Self {
        Failure { exit: Exit::Failed, what: what.into(), hint: None }
    }

    /// Returns the failure of a wrong command line.
    pub fn usage(what: impl Into<String>) -> Self {
        Failure { exit: Exit::Usage, ..Failure::new(what) }
    }

    /// Returns the failure of an error with a [`Kind`].
    pub fn of(kind: Kind, what: impl Into<String>) -> Self {
        let exit = match kind {
            Kind::Unavailable | Kind::Overloaded => Exit::Unreachable,
            Kind::NotFound | Kind::Invalid | Kind::Corrupt | Kind::Internal => Exit::Failed,
        };
        Failure { exit, ..Failure::new(what) }.if_full()
    }

    /// Sets the exit code of a full disk if the error has the text of one, and a hint if it has none.
    ///
    /// Errors of tables and of origins that are directories keep the text of the system's error, and not its
    /// number.
    #[must_use]
    pub fn if_full(self) -> Self {
        let full = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT];
        match full.iter().any(|errno| self.what.contains(&format!("(os error {})", errno.raw_os_error()))) {
            true => {
                let hint = self.hint.clone().unwrap_or_else(|| FREE_SPACE.to_owned());
                self.exit(Exit::NoSpace).hint(hint)
            }
            false => self,
        }
    }

    /// Returns the failure of a local file operation.
    pub fn io(what: impl fmt::Display, e: &std::io::Error) -> Self {
        let exit = match e.kind() {
            std::io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failed,
        };
        Failure { exit, ..Failure::new(format!("{what}: {e}")) }.if_full()
    }

    /// Returns the failure of an operation on temporary files in the state directory.
    #[must_use]
    pub fn scratch(e: &std::io::Error) -> Self {
        Failure::io("cannot use temporary files", e).hint("free some space, or give another --state-dir")
    }

    /// Fails once `stop` is set, by Ctrl-C or SIGTERM.
    ///
    /// # Errors
    /// A [`Failure`] with [`Exit::Interrupted`].
    pub fn if_stopped(stop: &AtomicBool) -> Result<(), Self> {
        if stop.load(Relaxed) { Err(Failure::new("stopped").exit(Exit::Interrupted)) } else { Ok(()) }
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Changes the exit code.
    #[must_use]
    pub fn exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let exit = if e.is_denied() {
            Exit::Denied
        } else if matches!(e, ClientError::LeaseExpired { .. }) {
            // The server answers, and the worker was too slow.
            Exit::Failed
        } else if e.is_unreachable() || e.kind().retryable() {
            Exit::Unreachable
        } else {
            Exit::Failed
        };
        let (what, hint) = e.parts();
        Failure { exit, hint: hint.map(str::to_owned), what }.if_full()
    }
}

impl From<RememberedVersionError> for Failure {
    fn from(e: RememberedVersionError) -> Self {
        Failure::new(e.to_string())
    }
}

impl From<ServerChoiceError> for Failure {
    fn from(e: ServerChoiceError) -> Self {
        let exit = match &e {
            ServerChoiceError::Bad(_) => Exit::Usage,
            ServerChoiceError::Stranger { .. } | ServerChoiceError::OpenDirectory { .. } => Exit::Denied,
            ServerChoiceError::Socket { .. } => Exit::Unreachable,
        };
        let text = e.to_string();
        let (what, hint) = text.split_once("; ").unwrap_or((&text, ""));
        let failure = Failure::new(what).exit(exit);
        if hint.is_empty() { failure } else { failure.hint(hint) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_full_disk_has_its_own_exit_code() {
        for errno in [28, 122] {
            let e = io::Error::from_raw_os_error(errno);
            assert_eq!(Failure::io("cannot write /t", &e).exit, Exit::NoSpace, "{e}");
            let of_tables = Failure::of(Kind::Unavailable, format!("chunks.parquet: cannot write: {e}"));
            assert_eq!((of_tables.exit as u8, of_tables.exit.as_str()), (6, "no_space"));
            assert!(of_tables.hint.is_some_and(|hint| hint.contains("--state-dir")));
            let of_server = Failure::new(format!("cannot write: {e}")).hint("there").if_full();
            assert_eq!((of_server.exit, of_server.hint.as_deref()), (Exit::NoSpace, Some("there")));
        }
        let denied = io::Error::from_raw_os_error(13);
        assert_eq!(Failure::io("cannot write /t", &denied).exit, Exit::Denied);
        assert_eq!(Failure::of(Kind::Unavailable, "timed out (os error 110)").exit, Exit::Unreachable);
    }
}
