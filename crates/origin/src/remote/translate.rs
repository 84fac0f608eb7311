//! The one place where the library's errors become ours. Texts that may repeat parts of a signed
//! request are left out.

use crate::OriginError;
use crate::wire::Answer;
use object_store::Error;
use object_store::client::HttpError;

pub(super) fn changed(what: &str, why: &str) -> OriginError {
    OriginError::Changed { what: what.to_owned(), why: why.to_owned() }
}

pub(super) fn corrupt(what: &str, why: String) -> OriginError {
    OriginError::Corrupt { what: what.to_owned(), why }
}

pub(super) fn unavailable(what: &str, why: &str) -> OriginError {
    OriginError::Unavailable { what: what.to_owned(), why: why.to_owned() }
}

pub(super) fn translate(what: &str, error: &Error) -> OriginError {
    let owned = what.to_owned();
    match error {
        Error::NotFound { .. } => return OriginError::NotFound { what: owned },
        Error::AlreadyExists { .. } => return OriginError::AlreadyExists { what: owned },
        Error::Precondition { .. } | Error::NotModified { .. } => {
            return changed(what, "its etag is another");
        }
        Error::InvalidPath { source } => return OriginError::invalid(what, source),
        Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::UnknownConfigurationKey { .. } => {
            return OriginError::invalid(what, "the store cannot do this");
        }
        _ => {}
    }
    if let Some(answer) = cause::<Answer>(error) {
        let why = answer.to_string();
        return match answer {
            Answer::SlowDown { retry_after } => {
                OriginError::Throttled { what: owned, retry_after: *retry_after }
            }
            Answer::Failed { .. } => OriginError::Unavailable { what: owned, why },
            Answer::Denied { .. } => OriginError::Denied { what: owned, why },
            Answer::Refused { .. } | Answer::PastEnd | Answer::Elsewhere => {
                OriginError::Invalid { what: owned, why }
            }
            Answer::RangeIgnored | Answer::TooLong => OriginError::Corrupt { what: owned, why },
        };
    }
    let transport = cause::<HttpError>(error);
    match (transport, error) {
        (Some(error), _) => unavailable(what, &deepest(error)),
        (None, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
            OriginError::Denied { what: owned, why: "the store said so".to_owned() }
        }
        (None, Error::Generic { .. }) => corrupt(what, deepest(error)),
        (None, _) => unavailable(what, &deepest(error)),
    }
}

/// The first cause that is a `T`.
pub(super) fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let mut source = std::error::Error::source(error);
    while let Some(next) = source {
        match next.downcast_ref() {
            Some(found) => return Some(found),
            None => source = next.source(),
        }
    }
    None
}

/// The innermost cause: "connection refused" rather than a chain of wrappers.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
