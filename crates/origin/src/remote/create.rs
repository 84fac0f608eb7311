//! Creating what must not be there: by a conditional request where the store keeps the condition.
//!
//! AWS, Azure and GCS keep it. Of servers that speak S3 some ignore it and answer 200, which would
//! silently replace another's object: so each configured endpoint is asked once, before the first
//! create, whether a second one of the same name is refused. Where it is not, a create looks first
//! and then writes: two writers at once may then both succeed, the last one's object stays. Fletch
//! creates by names that follow from content, so both would have written the same.

use super::Reach;
use crate::OriginError;
use crate::origin::PutMode;
use crate::uri::Scheme;
use bytes::Bytes;

/// Where the question is put, below the origin's own prefix, which is never indexed.
const PROBE: &str = "fletch/probe-";

impl Reach {
    /// Whether [`PutMode::Create`] is kept here. Asked once for each origin.
    pub(super) async fn creates(&self, what: &str) -> Result<bool, OriginError> {
        let remote = &self.remote;
        if remote.scheme != Scheme::S3 || remote.config.endpoint.is_none() {
            return Ok(true);
        }
        remote.creates.get_or_try_init(|| self.probe(what)).await.copied()
    }

    async fn probe(&self, what: &str) -> Result<bool, OriginError> {
        let path = format!("{PROBE}{:032x}", rand::random::<u128>());
        let create = || self.send(what, &path, Bytes::from_static(b"probe"), PutMode::Create);
        let kept = match create().await {
            // It knows no conditions and says so.
            Err(OriginError::Invalid { .. }) => return Ok(self.without(what)),
            Err(error) => return Err(error),
            Ok(()) => match create().await {
                Err(OriginError::AlreadyExists { .. }) => true,
                Ok(()) | Err(OriginError::Invalid { .. }) => self.without(what),
                Err(error) => return Err(error),
            },
        };
        if let Err(error) = self.delete(what, &path).await {
            tracing::warn!(%error, path, "the object of a probe stays at the origin");
        }
        Ok(kept)
    }

    fn without(&self, what: &str) -> bool {
        tracing::warn!(what, "the store ignores If-None-Match: creates look first and are not atomic");
        false
    }

    /// A create at a store that cannot be held to it.
    pub(super) async fn create_if_absent(
        &self,
        what: &str,
        path: &str,
        bytes: Bytes,
    ) -> Result<(), OriginError> {
        match self.head(what, path).await {
            Ok(_) => Err(OriginError::AlreadyExists { what: what.to_owned() }),
            Err(OriginError::NotFound { .. }) => self.send(what, path, bytes, PutMode::Overwrite).await,
            Err(error) => Err(error),
        }
    }
}
