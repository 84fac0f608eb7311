//! The place of a dataset: whether it can be listed, read and written, and how fast.

use super::args::DoctorArgs;
use super::finding::Finding;
use crate::environment;
use crate::failure::Failure;
use fletch_origin::{ConfiguredBy, OriginConfig, OriginError, OriginLimits, OriginUri, Origins, is_path};
use futures::StreamExt as _;
use std::time::{Duration, Instant};

pub const READ: &str = "origin";
pub const WRITE: &str = "origin-write";

/// The longest time of one call. A slower origin is a finding.
const IO_TIMEOUT: Duration = Duration::from_secs(10);
const ATTEMPTS_MAX: u32 = 2;
/// A first byte that takes this long makes every small file slow.
const SLOW: Duration = Duration::from_millis(750);

/// What a place is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Data,
    Tables,
}

#[derive(Debug, Clone)]
pub struct Facts {
    uri: String,
    role: Role,
    /// Whether the place has an object; `None` if it cannot be listed at all (plain HTTP).
    listed: Result<Option<bool>, OriginError>,
    /// The error of a read of the first object.
    read: Option<OriginError>,
    /// The longer of the waits for the first entry of the listing and for the first byte.
    first_byte: Duration,
    /// Whether a conditional write works.
    conditional: Option<Result<bool, OriginError>>,
    ahead_s: Option<i64>,
}

impl Facts {
    /// # Errors
    /// A URI or an `[[origin]]` table is not valid.
    pub async fn gather(args: &DoctorArgs, configs: Vec<OriginConfig>) -> Result<Vec<Self>, Failure> {
        let mut all = Vec::new();
        let places = [(args.source.as_ref(), Role::Data), (args.tables.as_ref(), Role::Tables)];
        for (text, role) in places.into_iter().filter_map(|(text, role)| Some((text?, role))) {
            let uri = OriginUri::from_arg(text).map_err(|e| Failure::usage(e.to_string()))?;
            let limits = OriginLimits {
                io_timeout: IO_TIMEOUT,
                attempts_max: ATTEMPTS_MAX,
                ..OriginLimits::default()
            };
            let mut origins = Origins::new(configs.clone(), limits)?;
            if !origins.is_configured(&uri)
                && let Some(config) = from_environment(&uri, &environment::of_process)?
            {
                origins = Origins::new(vec![config], limits)?;
            }
            all.push(look(&origins, &uri, role).await);
        }
        Ok(all)
    }

    /// Returns the names of the checks that ran.
    pub fn checks(&self) -> Vec<&'static str> {
        match self.role {
            Role::Data => vec![READ],
            Role::Tables => vec![READ, WRITE],
        }
    }

    /// Returns the origin, and by how many seconds its clock is ahead.
    pub fn clock(&self) -> Option<(String, i64)> {
        Some((self.uri.clone(), self.ahead_s?))
    }

    pub fn findings(&self) -> Vec<Finding> {
        let uri = &self.uri;
        let error = self.listed.as_ref().err().or(self.read.as_ref());
        if let Some(error) = error {
            let (what, fix) = explain(uri, error);
            return vec![Finding::error(READ, what, fix)];
        }
        let mut found = Vec::new();
        if matches!(self.listed, Ok(Some(false))) && self.role == Role::Data {
            found.push(Finding::warning(
                READ,
                format!("{uri} has no objects"),
                "check the prefix: `fletch index` fails on an empty place",
            ));
        }
        if self.first_byte >= SLOW {
            found.push(Finding::warning(
                READ,
                format!("{uri} took {} ms until its first byte", self.first_byte.as_millis()),
                "use an endpoint in the network or region of this machine, and pack small files: fletch pack",
            ));
        }
        match &self.conditional {
            Some(Ok(false)) => found.push(Finding::warning(
                WRITE,
                format!(
                    "{uri} ignores conditional writes (If-None-Match): two writers can replace each other"
                ),
                "let one process at a time index or pack into this place, or use another store for --tables",
            )),
            Some(Err(error)) => {
                let (what, fix) = explain(uri, error);
                found.push(Finding::error(WRITE, format!("cannot write there: {what}"), fix));
            }
            Some(Ok(true)) | None => {}
        }
        found
    }
}

async fn look(origins: &Origins, uri: &OriginUri, role: Role) -> Facts {
    let mut facts = Facts {
        uri: uri.to_string(),
        role,
        listed: Ok(None),
        read: None,
        first_byte: Duration::ZERO,
        conditional: None,
        ahead_s: None,
    };
    let origin = match origins.open(uri) {
        Ok(origin) => origin,
        Err(e) => {
            facts.listed = Err(e);
            return facts;
        }
    };
    let begun = Instant::now();
    let first = if uri.is_plain_http() {
        // Such a server has no listing. Any answer shows that it can be reached.
        facts.read = match origin.head("fletch/tags/latest.json").await {
            Ok(_) | Err(OriginError::NotFound { .. }) => None,
            Err(e) => Some(e),
        };
        None
    } else {
        let mut objects = origin.list("");
        facts.listed = Ok(Some(false));
        // The markers of folders and keys that are no paths cannot be read.
        loop {
            match objects.next().await {
                None => break None,
                Some(Ok(object)) => {
                    facts.listed = Ok(Some(true));
                    if is_path(&object.path) {
                        break Some(object);
                    }
                }
                Some(Err(e)) => {
                    facts.listed = Err(e);
                    break None;
                }
            }
        }
    };
    facts.first_byte = begun.elapsed();
    if let Some(object) = first {
        let begun = Instant::now();
        facts.read = origin.get(&object.path, Some(0..object.size.min(1)), None).await.err();
        facts.first_byte = facts.first_byte.max(begun.elapsed());
    }
    if role == Role::Tables && facts.listed.is_ok() {
        facts.conditional = Some(origin.has_conditional_create().await);
    }
    facts.ahead_s = origins.stats().clock_ahead_s;
    facts
}

/// Returns what is wrong with the origin and what to do, for an error of a call.
fn explain(uri: &str, error: &OriginError) -> (String, String) {
    let text = error.to_string();
    let has = |word: &str| text.contains(word);
    let fix = match error {
        _ if has("RequestTimeTooSkewed") => {
            "set the clock of this machine: timedatectl set-ntp true".to_owned()
        }
        _ if has("AuthorizationHeaderMalformed") || has("PermanentRedirect") || has("is in region") => {
            "the region is wrong: set AWS_REGION, or `region` in its [[origin]], to that of the bucket"
                .to_owned()
        }
        _ if has("NoSuchBucket") || has("ContainerNotFound") || has("no such bucket") => no_bucket(),
        // A prefix that does not exist lists as empty. Only a bucket can be missing.
        OriginError::NotFound { .. } => no_bucket(),
        OriginError::Denied { .. } | OriginError::Expired { .. } => {
            "give credentials that may list and read it (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or \
             `credentials` in its [[origin]]), or ask its owner for the permission"
                .to_owned()
        }
        OriginError::Throttled { .. } => {
            "set requests_per_second in its [[origin]], below the store's limit".to_owned()
        }
        OriginError::Unavailable { .. } => {
            "check the network and the endpoint: `endpoint` in its [[origin]], or AWS_ENDPOINT_URL".to_owned()
        }
        OriginError::WrongAnswer { .. } => {
            "check the endpoint, and a proxy before it: the answer is not one of such a store".to_owned()
        }
        _ => "correct the URI, or its [[origin]] table in --config".to_owned(),
    };
    let what = if text.contains(uri) { text } else { format!("{uri}: {text}") };
    (what, fix)
}

fn no_bucket() -> String {
    "correct the name of the bucket, its account, or the endpoint that has it".to_owned()
}

/// Returns how the environment says that a store without an `[[origin]]` is reached. A cloud that the
/// environment says nothing of is tried, too: this machine may have an identity there.
fn from_environment(
    uri: &OriginUri,
    var: environment::Variables<'_>,
) -> Result<Option<OriginConfig>, Failure> {
    let Some(prefix) = environment::origin_of(uri) else { return Ok(None) };
    let (configured_by, allow_http) = (ConfiguredBy::Environment, prefix.starts_with("http://"));
    let unknown = OriginConfig { prefix, configured_by, allow_http, ..OriginConfig::default() };
    Ok(Some(environment::config_of(uri, var)?.unwrap_or(unknown)))
}

#[cfg(test)]
mod tests;
