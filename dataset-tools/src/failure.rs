//! How a command ends: an exit code, and when it failed what happened, where, and what to do.

use fletch_core::Kind;
use std::fmt;

/// Exit codes; other programs rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Everything was done.
    Ok = 0,
    /// It failed.
    Failed = 1,
    /// The command line cannot be understood.
    Usage = 2,
    /// Done in part; what was left out was listed.
    Partial = 3,
    /// A server or an origin cannot be reached.
    Unreachable = 4,
    /// Not allowed.
    Denied = 5,
    /// Ended by Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// The word in `--json` output.
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

/// A command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// With which exit code.
    pub exit: Exit,
    /// What happened, naming the path or address.
    pub what: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with exit code 1.
    pub fn new(what: impl Into<String>) -> Self {
        Failure { exit: Exit::Failed, what: what.into(), hint: None }
    }

    /// A wrong command line.
    pub fn usage(what: impl Into<String>) -> Self {
        Failure { exit: Exit::Usage, ..Failure::new(what) }
    }

    /// The failure of something that has a [`Kind`].
    pub fn of(kind: Kind, what: impl Into<String>) -> Self {
        let exit = match kind {
            Kind::Unavailable | Kind::Overloaded => Exit::Unreachable,
            Kind::NotFound | Kind::Invalid | Kind::Corrupt | Kind::Internal => Exit::Failed,
        };
        Failure { exit, ..Failure::new(what) }
    }

    /// The failure of a local file operation.
    pub fn io(what: impl fmt::Display, e: &std::io::Error) -> Self {
        let exit = match e.kind() {
            std::io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failed,
        };
        Failure { exit, ..Failure::new(format!("{what}: {e}")) }
    }

    /// Adds what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With another exit code.
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
