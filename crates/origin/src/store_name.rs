//! Names the store that a bucket is at, because two stores may have buckets with one name.
//!
//! 1. Equal stores have equal names: the name has neither the region of a cloud that has one space of names
//!    for all of them, nor the bucket, nor a port that the scheme implies.
//! 2. Two stores have two names, if their addresses or their accounts tell them apart.
//! 3. A name is a part of a URI (`s3://bucket~NAME/prefix`), and says to people where the bucket is.

use crate::uri::{Address, Scheme};
use crate::{OriginConfig, OriginUri};
use std::fmt::Write as _;
use url::Url;

const GOOGLE: &str = "storage.googleapis.com";
const AZURE: &str = "blob.core.windows.net";

impl OriginConfig {
    /// Returns the name of the store that a bucket or container is at, if it is reached as this table says.
    ///
    /// It is `HOST[:PORT]` of the endpoint, with a `+` and each part of its path. Buckets of AWS are at
    /// `amazonaws.com`, or at the name of their partition. Azure's name has the account. Returns `None` for a
    /// directory, a plain server, and a container whose account is not known.
    #[must_use]
    pub fn store_of(&self, uri: &OriginUri) -> Option<String> {
        let Address::Store { scheme, host: bucket, .. } = uri.address() else { return None };
        let endpoint = match &self.endpoint {
            Some(endpoint) => Some(Url::parse(endpoint).ok()?),
            None => None,
        };
        match (scheme, endpoint) {
            (Scheme::Http | Scheme::Https, _) => None,
            (Scheme::S3, None) => Some(partition(self.region.as_deref().unwrap_or_default()).to_owned()),
            (Scheme::S3, Some(url)) => {
                let host = url.host_str()?;
                match host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn") {
                    true => Some(partition_of_host(host).to_owned()),
                    false => name(&url, Some(bucket).filter(|_| self.virtual_hosted == Some(true))),
                }
            }
            (Scheme::Gcs, None) => Some(GOOGLE.to_owned()),
            (Scheme::Gcs, Some(url)) => name(&url, None),
            (Scheme::Azure, None) => Some(format!("{}.{AZURE}", self.account.as_deref()?)),
            (Scheme::Azure, Some(url)) => {
                let plain = name(&url, None)?;
                match self.account.as_deref() {
                    Some(account) if !has_account(&url, account) => {
                        Some(format!("{plain}+{}", encoded(account)))
                    }
                    Some(_) | None => Some(plain),
                }
            }
        }
    }
}

/// Returns the partition of a region of AWS. The names of buckets are unique in it.
fn partition(region: &str) -> &'static str {
    match region {
        _ if region.starts_with("cn-") => "amazonaws.com.cn",
        _ if region.starts_with("us-gov-") => "us-gov.amazonaws.com",
        _ => "amazonaws.com",
    }
}

fn partition_of_host(host: &str) -> &'static str {
    let region = host.split('.').find(|label| label.starts_with("cn-") || label.starts_with("us-gov-"));
    partition(region.unwrap_or_default())
}

/// Returns whether an endpoint of Azure names the account itself: in its path, or before its host.
fn has_account(url: &Url, account: &str) -> bool {
    let last = url.path().trim_end_matches('/').rsplit('/').next();
    let first = url.host_str().and_then(|host| host.split('.').next());
    last == Some(account) || first == Some(account)
}

/// Returns the name of the store at an endpoint. The host may begin with the bucket.
fn name(url: &Url, bucket: Option<&String>) -> Option<String> {
    let host = url.host_str()?;
    let without = bucket.and_then(|bucket| host.strip_prefix(bucket.as_str())?.strip_prefix('.'));
    let mut name = without.unwrap_or(host).to_owned();
    // Without a port, the name is that of HTTPS.
    let port = if url.scheme() == "https" { url.port() } else { url.port_or_known_default() };
    if let Some(port) = port {
        // Writing into a text cannot fail.
        let _written = write!(name, ":{port}");
    }
    for part in url.path().split('/').filter(|part| !part.is_empty()) {
        name.push('+');
        name.push_str(&encoded(part));
    }
    Some(name)
}

/// Returns a text with the characters that a name of a store may have.
fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'-' | b'.' | b'_' => out.push(char::from(byte)),
            byte if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            byte => {
                let _written = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(uri: &str, endpoint: Option<&str>, more: impl FnOnce(&mut OriginConfig)) -> Option<String> {
        let mut config = OriginConfig { endpoint: endpoint.map(str::to_owned), ..OriginConfig::default() };
        more(&mut config);
        config.store_of(&OriginUri::parse(uri).expect(uri))
    }

    #[test]
    fn one_store_has_one_name_and_two_stores_have_two() {
        let s3 = |endpoint: &str| store("s3://photos/set", Some(endpoint), |_| {}).expect(endpoint);
        assert_eq!(s3("http://127.0.0.1:9000/"), "127.0.0.1:9000");
        assert_eq!(s3("http://Minio.example:80"), s3("http://minio.example"));
        assert_eq!(s3("https://minio.example:443"), "minio.example");
        assert_ne!(s3("http://minio.example"), s3("https://minio.example"));
        assert_eq!(s3("http://[::1]:9000/a/b~c"), "[::1]:9000+a+b%7Ec");
        let virtual_hosted = |c: &mut OriginConfig| c.virtual_hosted = Some(true);
        let in_host = store("s3://photos", Some("https://photos.minio.example"), virtual_hosted);
        assert_eq!(in_host, store("s3://photos", Some("https://minio.example"), virtual_hosted));
    }

    #[test]
    fn the_names_of_clouds_have_no_region_and_azure_s_have_the_account() {
        let region = |name: &'static str| move |c: &mut OriginConfig| c.region = Some(name.to_owned());
        let aws = |name| store("s3://photos", None, region(name)).expect(name);
        assert_eq!(
            (aws("eu-central-1"), aws("cn-north-1")),
            ("amazonaws.com".into(), "amazonaws.com.cn".into())
        );
        assert_eq!(aws("us-gov-west-1"), "us-gov.amazonaws.com");
        let at = |endpoint| store("s3://photos", Some(endpoint), |_| {}).expect(endpoint);
        assert_eq!(at("https://s3.eu-central-1.amazonaws.com"), aws("us-east-1"));
        assert_eq!(at("https://s3.cn-north-1.amazonaws.com.cn"), aws("cn-north-1"));
        assert_eq!(store("gs://photos", None, |_| {}).as_deref(), Some(GOOGLE));
        assert_eq!(
            store("gs://photos", Some("https://storage.googleapis.com"), |_| {}).as_deref(),
            Some(GOOGLE)
        );

        let account = |name: &'static str| move |c: &mut OriginConfig| c.account = Some(name.to_owned());
        let azure = |endpoint, name| store("az://images", endpoint, account(name)).expect(name);
        assert_eq!(azure(None, "one"), "one.blob.core.windows.net");
        assert_eq!(azure(Some("https://one.blob.core.windows.net"), "one"), azure(None, "one"));
        assert_eq!(azure(Some("http://127.0.0.1:10000/one"), "one"), "127.0.0.1:10000+one");
        assert_eq!(azure(Some("http://127.0.0.1:10000"), "two"), "127.0.0.1:10000+two");
        assert_eq!(store("az://images", None, |_| {}), None, "the account is not known");
        for uri in ["/data", "https://host/data"] {
            assert_eq!(store(uri, None, |_| {}), None);
        }
    }

    #[test]
    fn a_prefix_with_a_store_fits_its_table() {
        let config = |prefix: &str, endpoint: &str| OriginConfig {
            prefix: prefix.to_owned(),
            endpoint: Some(endpoint.to_owned()),
            allow_http: true,
            ..OriginConfig::default()
        };
        let uri = config("s3://photos~127.0.0.1:9000", "http://127.0.0.1:9000").check().expect("fits");
        assert_eq!(
            (uri.store(), uri.without_store().to_string().as_str()),
            (Some("127.0.0.1:9000"), "s3://photos")
        );
        let bare = OriginUri::parse("s3://photos/a").expect("uri");
        let there = bare.at_store(Some("127.0.0.1:9000")).expect("named");
        assert!(uri.contains(&there) && !uri.contains(&bare) && there.without_store() == bare);
        assert_eq!(there.top(), Some(uri));
        let other = config("s3://photos~127.0.0.1:9000", "http://127.0.0.1:9001").check();
        assert!(other.expect_err("another store").to_string().contains("name 127.0.0.1:9001"));
    }
}
