//! How a command ends: an exit code; after a failure also what happened, to what, and what to do next.

use fletch_client::ClientError;
use fletch_client::fallback::RememberedVersionError;
use fletch_client::server_choice::ServerChoiceError;
use fletch_core::Kind;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
        Failure { exit, ..Failure::new(what) }
    }

    /// Returns the failure of a local file operation.
    pub fn io(what: impl fmt::Display, e: &std::io::Error) -> Self {
        let exit = match e.kind() {
            std::io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failed,
        };
        Failure { exit, ..Failure::new(format!("{what}: {e}")) }
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
        Failure { exit, hint: hint.map(str::to_owned), what }
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
