//! Errors as Python exceptions: one class for each kind, with the server's error code and hint.

use fletch_api::{Code, Problem};
use fletch_client::ClientError;
use fletch_client::selection::SelectionError;
use fletch_core::{Kind, Mismatch};
use fletch_tables::TableError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The result of `__reduce__`: the function that creates the object again, and its arguments.
pub type Pickled<'py, T> = PyResult<(Bound<'py, PyAny>, T)>;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The version's tables could not be read.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The server refused one item of a batch.
    #[error("{path}: {problem}")]
    Item {
        /// The item's path.
        path: String,
        /// The server's error.
        problem: Box<Problem>,
    },
    /// The bytes of an item do not match its hash.
    #[error("wrong bytes for {path}: {mismatch}")]
    Corrupt {
        /// The item's path.
        path: String,
        /// The expected hash and the hash of the bytes.
        mismatch: Mismatch,
    },
    /// A response breaks the API's contract.
    #[error("{path}: {why}")]
    Protocol {
        /// The item's path.
        path: String,
        /// The rule that it breaks.
        why: String,
    },
    /// The version has no such entry.
    #[error("{0}")]
    Absent(String),
    /// A selection file is not valid.
    #[error(transparent)]
    Select(#[from] SelectionError),
    /// An argument is not valid.
    #[error("{0}")]
    Invalid(String),
}

impl Failure {
    /// Returns the kind of the error, which says who can act on it.
    pub fn kind(&self) -> Kind {
        match self {
            Failure::Client(e) => e.kind(),
            Failure::Table(e) => e.kind(),
            Failure::Select(e) => e.kind(),
            Failure::Item { problem, .. } => problem.code.kind(),
            Failure::Corrupt { .. } | Failure::Protocol { .. } => Kind::Corrupt,
            Failure::Absent(_) => Kind::NotFound,
            Failure::Invalid(_) => Kind::Invalid,
        }
    }

    fn code(&self) -> Option<Code> {
        match self {
            Failure::Client(e) => e.code(),
            Failure::Item { problem, .. } => Some(problem.code),
            _ => None,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Failure::Client(e) => e.hint().unwrap_or_default(),
            Failure::Item { problem, .. } => &problem.hint,
            _ => "",
        }
    }
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::NotFound => "NotFound",
        Kind::Invalid => "Invalid",
        Kind::Corrupt => "Corrupt",
        Kind::Unavailable => "Unavailable",
        Kind::Overloaded => "Overloaded",
        Kind::Internal => "Internal",
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        Python::attach(|py| raised(py, &failure).unwrap_or_else(|e| e))
    }
}

fn raised(py: Python<'_>, failure: &Failure) -> PyResult<PyErr> {
    let named = PyDict::new(py);
    named.set_item("code", failure.code().map_or("", Code::as_str))?;
    named.set_item("hint", failure.hint())?;
    named.set_item("retryable", failure.kind().retryable())?;
    let class = py.import("fletch.errors")?.getattr(class(failure.kind()))?;
    Ok(PyErr::from_value(class.call((failure.to_string(),), Some(&named))?))
}
