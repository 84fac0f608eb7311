//! Decides which URIs a domain may register, and which files of a directory the server reads.
//!
//! The server reads with its own rights, which are wider than those of the caller who registers. So:
//! 1. The server reads a store only under an `[[origin]]` that is configured for the domain. It reads a
//!    directory only under one of `local.dirs` of the domain or under such an `[[origin]]`; or any directory,
//!    if every caller is on this machine and `local.dirs` is empty.
//! 2. A URI is checked when it is registered, and again whenever it is opened. Each file of a directory is
//!    checked when it is open, by its real location, so that neither a link nor a swapped directory leads
//!    outside ([`Origin::confined`]).
//! 3. Addresses of cloud metadata are rejected whatever is configured, because they return credentials.
//! 4. A URI of another domain and one that is not configured get the same error, and so do a directory
//!    outside and one that does not exist. The file system is not asked about a directory outside.

use super::VersionError;
use crate::app::config::{LocalDir, lists};
use fletch_api::Code;
use fletch_core::Domain;
use fletch_origin::{
    Origin, OriginError, OriginUri, Origins,
    local::{self, Place},
};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::Arc,
};
use url::{Host, Url};

/// Host names of cloud metadata.
const METADATA_HOSTS: [&str; 4] =
    ["metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"];
/// Addresses of cloud metadata outside the link-local ranges.
const METADATA_V4: [Ipv4Addr; 2] = [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(168, 63, 129, 16)];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// Why a place may not be registered, or is not read any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UriNotAllowed {
    /// A relative path. The server has another working directory than the client.
    #[error("{0:?} is a relative path; give an absolute path or a URI")]
    Relative(String),
    /// Not a valid URI.
    #[error(transparent)]
    Invalid(OriginError),
    /// An address of cloud metadata, which returns credentials.
    #[error("{0} is an address of cloud metadata, which this server never reads")]
    Metadata(String),
    /// A store that this domain may not read.
    #[error("{0} is not under an [[origin]] that is configured for this domain")]
    Store(OriginUri),
    /// A store for which nobody handed over credentials since this server started.
    #[error(
        "the server has no credentials for {0}: it keeps them in memory only, and nobody handed them over \
         since it started"
    )]
    NoCredentials(OriginUri),
    /// A directory that this domain may not read.
    #[error("{0} is not a directory under one of local.dirs")]
    Directory(OriginUri),
}

impl UriNotAllowed {
    /// What to do about [`UriNotAllowed::NoCredentials`].
    pub const HAND_OVER: &'static str =
        "run `fletch mount` again to hand over credentials, or add an [[origin]] to the server's settings";

    /// Returns the stable code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            UriNotAllowed::Relative(_) | UriNotAllowed::Invalid(_) => Code::BadRequest,
            UriNotAllowed::Metadata(_)
            | UriNotAllowed::Store(_)
            | UriNotAllowed::NoCredentials(_)
            | UriNotAllowed::Directory(_) => Code::UriNotAllowed,
        }
    }

    /// Returns what to do about it.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            UriNotAllowed::Relative(_) | UriNotAllowed::Invalid(_) => "see /v1/openapi.json".to_owned(),
            UriNotAllowed::Metadata(_) => "give the URI of the store that has the dataset".to_owned(),
            UriNotAllowed::Store(uri) => {
                format!("add an [[origin]] with a prefix of {uri} to the server's settings")
            }
            UriNotAllowed::NoCredentials(_) => Self::HAND_OVER.to_owned(),
            UriNotAllowed::Directory(_) => "add it to local.dirs in the server's settings".to_owned(),
        }
    }
}

/// The rules for URIs.
#[derive(Debug, Clone)]
pub struct Allowlist {
    origins: Origins,
    dirs: Arc<[LocalDir]>,
    local_only: bool,
    takes_credentials: bool,
}

impl Allowlist {
    /// Creates the rules. `dirs` are `local.dirs`.
    ///
    /// `local_only` says that every caller is on this machine. An origin or a directory without domains is
    /// then for every domain, and without `dirs` every directory is allowed. Otherwise it is for none.
    #[must_use]
    pub fn new(origins: Origins, dirs: &[LocalDir], local_only: bool) -> Self {
        Allowlist { origins, dirs: dirs.into(), local_only, takes_credentials: false }
    }

    /// Returns the same rules for a server that may take credentials from its user, which errors then say.
    #[must_use]
    pub fn taking_credentials(self, takes_credentials: bool) -> Self {
        Allowlist { takes_credentials, ..self }
    }

    /// Returns the configured origins.
    #[must_use]
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    fn any_dir(&self) -> bool {
        self.local_only && self.dirs.is_empty()
    }

    /// Checks a URI that `domain` registers. Returns it, with the real path of a directory. Blocking.
    ///
    /// # Errors
    /// [`UriNotAllowed`].
    pub fn check(&self, domain: &Domain, text: &str) -> Result<OriginUri, UriNotAllowed> {
        if !text.contains("://") && !text.starts_with('/') {
            return Err(UriNotAllowed::Relative(text.to_owned()));
        }
        // First, so that the error does not depend on the schemes of this build.
        if let Some(host) = Url::parse(text).ok().as_ref().and_then(Url::host).filter(is_metadata) {
            return Err(UriNotAllowed::Metadata(host.to_string()));
        }
        let uri = OriginUri::parse(text).map_err(UriNotAllowed::Invalid)?;
        let Some(dir) = uri.as_local() else { return self.check_name(domain, &uri).map(|()| uri) };
        if self.any_dir() {
            return Ok(uri);
        }
        // Follow links, because a link may lead outside.
        let real = local::real_path(dir, |path| self.place(domain, path)).ok().flatten();
        let real = real.filter(|real| std::fs::symlink_metadata(real).is_ok_and(|m| m.is_dir()));
        real.and_then(|real| OriginUri::local(&real).ok()).ok_or(UriNotAllowed::Directory(uri))
    }

    /// Judges a path of this machine for a domain, by its name alone.
    fn place(&self, domain: &Domain, path: &Path) -> Place {
        if self.may_read(domain, path) {
            return Place::Inside;
        }
        // A directory of the settings may be a link itself.
        match self.dirs.iter().find(|d| d.named == path && self.may_read(domain, &d.real)) {
            Some(dir) => Place::Named(dir.real.clone()),
            None => Place::Outside,
        }
    }

    /// Returns whether a domain may read what lies at a real path.
    fn may_read(&self, domain: &Domain, real: &Path) -> bool {
        OriginUri::local(real).is_ok_and(|uri| self.check_name(domain, &uri).is_ok())
    }

    /// Opens a registered URI of `domain`.
    ///
    /// # Errors
    /// [`VersionError::UriNotAllowed`] if the settings no longer allow it.
    pub fn open(&self, domain: &Domain, uri: &str) -> Result<Origin, VersionError> {
        let uri = OriginUri::parse(uri).map_err(VersionError::Origin)?;
        self.check_name(domain, &uri).map_err(VersionError::UriNotAllowed)?;
        let origin = self.origins.open(&uri).map_err(VersionError::Origin)?;
        if self.any_dir() || uri.as_local().is_none() {
            return Ok(origin);
        }
        let (rules, domain) = (self.clone(), domain.clone());
        Ok(origin.confined(Arc::new(move |real: &Path| rules.may_read(&domain, real))))
    }

    /// Checks by name alone that `domain` may read a URI.
    fn check_name(&self, domain: &Domain, uri: &OriginUri) -> Result<(), UriNotAllowed> {
        let listed = |domains: &[String]| lists(domains, domain, self.local_only);
        let configured = self.origins.domains(uri);
        let Some(dir) = uri.as_local() else {
            return match configured {
                Some(domains) if listed(domains) => Ok(()),
                None if self.takes_credentials => Err(UriNotAllowed::NoCredentials(uri.clone())),
                _ => Err(UriNotAllowed::Store(uri.clone())),
            };
        };
        // `local.dirs` opens nothing that an [[origin]] closes, and the longest of its directories decides.
        let above = self.dirs.iter().filter(|d| dir.starts_with(&d.real));
        let nearest = above.max_by_key(|d| d.real.components().count()).map(|d| d.domains.as_slice());
        let within = configured.or(nearest).is_some_and(listed);
        if within || self.any_dir() { Ok(()) } else { Err(UriNotAllowed::Directory(uri.clone())) }
    }
}

fn is_metadata(host: &Host<&str>) -> bool {
    let ip = match host {
        Host::Domain(name) => {
            let name = name.trim_end_matches('.').to_ascii_lowercase();
            if METADATA_HOSTS.contains(&name.as_str()) {
                return true;
            }
            // Url parses addresses for web schemes only.
            let Ok(ip) = name.parse::<IpAddr>() else { return false };
            ip
        }
        Host::Ipv4(ip) => IpAddr::V4(*ip),
        Host::Ipv6(ip) => IpAddr::V6(*ip),
    };
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_link_local() || METADATA_V4.contains(&ip),
        IpAddr::V6(ip) => ip.is_unicast_link_local() || ip == METADATA_V6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_origin::{OriginConfig, OriginLimits};

    fn domain(name: &str) -> Domain {
        Domain::new(name).expect("name")
    }

    fn origins(configs: Vec<OriginConfig>) -> Origins {
        Origins::new(configs, OriginLimits::default()).expect("origins")
    }

    #[test]
    fn metadata_is_refused_by_every_name_it_has() {
        let allowed = Allowlist::new(origins(Vec::new()), &[], true);
        for text in [
            "http://169.254.169.254/latest/meta-data/iam/",
            "https://169.254.169.254:443/x",
            "http://2852039166/x",
            "http://0xA9FEA9FE/x",
            "http://169.254.170.2/v2/credentials",
            "http://[fe80::1]/x",
            "http://[fd00:ec2::254]/x",
            "http://[::ffff:169.254.169.254]/x",
            "http://metadata.google.internal/computeMetadata/v1/",
            "http://METADATA.google.internal./x",
            "http://100.100.100.200/latest/",
            "s3://169.254.169.254/x",
        ] {
            let told = allowed.check(&domain("a"), text).expect_err(text);
            assert!(matches!(told, UriNotAllowed::Metadata(_)), "{text}: {told}");
            assert_eq!(told.code(), Code::UriNotAllowed);
        }
    }

    #[test]
    fn stores_are_for_the_domains_they_are_configured_for() {
        let config = |prefix: &str, domains: &[&str]| OriginConfig {
            prefix: prefix.to_owned(),
            domains: domains.iter().map(|d| (*d).to_owned()).collect(),
            ..OriginConfig::default()
        };
        let of = vec![
            config("s3://bucket", &["*"]),
            config("s3://bucket/secret", &["a"]),
            config("s3://open", &[]),
        ];
        let allowed = Allowlist::new(origins(of), &[], false);
        let ok = |d: &str, uri: &str| allowed.check(&domain(d), uri);
        assert!(ok("a", "s3://bucket/x").is_ok() && ok("b", "s3://bucket/x").is_ok());
        assert!(ok("a", "s3://bucket/secret/x").is_ok());
        let other = ok("b", "s3://bucket/secret/x").expect_err("another domain's");
        let nobody = ok("b", "s3://bucket2/secret/x").expect_err("nobody's");
        assert_eq!((other.code(), nobody.code()), (Code::UriNotAllowed, Code::UriNotAllowed));
        assert_eq!(other.to_string().replace("bucket", "bucket2"), nobody.to_string(), "one answer");
        for uri in ["s3://bucket/secret/x", "s3://other/x", "s3://open/x", "file:///etc"] {
            assert!(matches!(allowed.open(&domain("b"), uri), Err(VersionError::UriNotAllowed(_))), "{uri}");
        }
        assert!(allowed.open(&domain("a"), "s3://bucket/secret/x").is_ok());
    }

    #[test]
    fn directories_are_allowed_by_where_they_really_are() {
        let top = tempfile::tempdir().expect("tempdir");
        let real = std::fs::canonicalize(top.path()).expect("real");
        for d in ["open/set", "open/closer/set", "own/set", "shut"] {
            std::fs::create_dir_all(real.join(d)).expect("mkdir");
        }
        std::os::unix::fs::symlink(real.join("shut"), real.join("open/way-out")).expect("symlink");
        std::os::unix::fs::symlink(real.join("shut/none"), real.join("open/way-nowhere")).expect("symlink");
        std::os::unix::fs::symlink(real.join("open/set"), real.join("shut/way-in")).expect("symlink");
        std::os::unix::fs::symlink(real.join("open"), real.join("alias")).expect("symlink");
        let at = |rel: &str| real.join(rel).display().to_string();
        let dir = |named: &str| LocalDir::read(&at(named)).expect(named);
        let dirs = [dir("alias=*"), dir("own=*"), dir("open/closer=b")];
        let own = OriginConfig { prefix: at("own"), domains: vec!["a".into()], ..OriginConfig::default() };
        let allowed = Allowlist::new(origins(vec![own]), &dirs, false);
        let ok = |d: &str, rel: &str| allowed.check(&domain(d), &at(rel)).is_ok();
        assert!(ok("a", "open/set") && ok("b", "open/set") && ok("a", "own/set"));
        assert!(ok("b", "open/closer/set") && !ok("a", "open/closer/set"), "the nearest directory decides");
        let kept = allowed.check(&domain("b"), &at("alias/set")).expect("as the settings name it");
        assert_eq!(kept.as_local(), Some(real.join("open/set").as_path()));
        for (d, rel) in [
            ("b", "own/set"),
            ("a", "shut"),
            ("a", "open/way-out"),
            ("a", "open/way-nowhere"),
            ("a", "shut/way-in"),
            ("a", "open/none"),
            ("a", "shut/../open"),
        ] {
            assert!(!ok(d, rel), "{d} {rel}");
        }
        for etc in ["file:///etc", "/etc", "file:///etc/passwd", "file://localhost/etc", "/"] {
            assert!(allowed.check(&domain("a"), etc).is_err(), "{etc}");
        }
        let none = Allowlist::new(origins(Vec::new()), &[], false);
        assert!(
            none.check(&domain("a"), &at("open/set")).is_err(),
            "with tokens no directory is everybody's"
        );
        let any = Allowlist::new(origins(Vec::new()), &[], true);
        assert!(any.check(&domain("a"), "/no/such/dir").is_ok(), "before it is there");
    }
}
