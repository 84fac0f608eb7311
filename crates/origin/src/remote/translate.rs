//! Translates the errors of `object_store` into [`OriginError`].
//!
//! Leaves out texts that may repeat a signed request.

use crate::OriginError;
use crate::transport::BadAnswer;
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
            return changed(what, "its etag differs");
        }
        Error::InvalidPath { source } => return OriginError::invalid(what, source),
        Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::UnknownConfigurationKey { .. } => {
            return OriginError::invalid(what, "the store does not support this operation");
        }
        _ => {}
    }
    if let Some(answer) = cause::<BadAnswer>(error) {
        let why = answer.to_string();
        return match answer {
            BadAnswer::SlowDown { retry_after } => {
                OriginError::Throttled { what: owned, retry_after: *retry_after }
            }
            BadAnswer::Failed { .. } => OriginError::Unavailable { what: owned, why },
            BadAnswer::Denied { .. } => OriginError::Denied { what: owned, why },
            BadAnswer::Refused { .. } | BadAnswer::PastEnd | BadAnswer::Redirected => {
                OriginError::Invalid { what: owned, why }
            }
            BadAnswer::RangeIgnored | BadAnswer::TooLong => OriginError::Corrupt { what: owned, why },
        };
    }
    let transport = cause::<HttpError>(error);
    match (transport, error) {
        (Some(error), _) => unavailable(what, &deepest(error)),
        (None, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
            OriginError::Denied { what: owned, why: "the store rejected the credentials".to_owned() }
        }
        (None, Error::Generic { .. }) => corrupt(what, deepest(error)),
        (None, _) => unavailable(what, &deepest(error)),
    }
}

/// Returns the first cause that is a `T`.
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

/// Returns the innermost cause, such as "connection refused".
fn deepest(error: &dyn std::error::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
