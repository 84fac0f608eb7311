//! Errors as Python exceptions: one class for each kind, with the server's code and hint.

use fletch_api::{Code, Problem};
use fletch_client::ClientError;
use fletch_client::selection::SelectionError;
use fletch_core::{Kind, Mismatch};
use fletch_tables::TableError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// How an object is pickled: what makes it again, and of what.
pub type Pickled<'py, T> = PyResult<(Bound<'py, PyAny>, T)>;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The server was asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The version's tables.
    #[error(transparent)]
    Table(#[from] TableError),
    /// One item of several.
    #[error("{path}: {problem}")]
    Item {
        /// Which.
        path: String,
        /// What the server says of it.
        problem: Box<Problem>,
    },
    /// One item's bytes are others.
    #[error("wrong bytes for {path}: {mismatch}")]
    Corrupt {
        /// Which.
        path: String,
        /// What they are.
        mismatch: Mismatch,
    },
    /// The answer breaks the contract.
    #[error("{path}: {why}")]
    Protocol {
        /// Which item.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// There is no such thing in the version.
    #[error("{0}")]
    Absent(String),
    /// The file is no selection.
    #[error(transparent)]
    Select(#[from] SelectionError),
    /// It cannot be asked for.
    #[error("{0}")]
    Invalid(String),
}

impl Failure {
    /// Who can act on it.
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
