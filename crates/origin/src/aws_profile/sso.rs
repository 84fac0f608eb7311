//! Profiles of AWS's single sign-on: exchanges the token that `aws sso login` left for credentials.

use super::provider::{Fetched, answer};
use super::{AwsProfile, Variables, time};
use crate::OriginError;
use crate::credentials::text;
use crate::transport::ClientSettings;
use crate::transport::credentials_client::NoCredentials;
use object_store::aws::AwsCredential;
use reqwest::header::HeaderValue;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The most files of the cache that are looked at.
const FILES_MAX: usize = 1000;

/// A profile of single sign-on.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SsoLogin {
    profile: String,
    start_url: String,
    region: String,
    account: String,
    role: String,
    cache: PathBuf,
    /// The base URL of the portal, in place of AWS's own.
    portal: Option<String>,
}

/// A file of the cache. Files of client registrations have other keys.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedToken {
    start_url: Option<String>,
    access_token: Option<String>,
    expires_at: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    role_credentials: RoleCredentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RoleCredentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    /// Milliseconds since 1970.
    expiration: Option<u64>,
}

impl SsoLogin {
    /// Returns the login of a profile; `None` if the profile is not one of single sign-on.
    pub fn of(profile: &AwsProfile, var: Variables<'_>) -> Result<Option<SsoLogin>, OriginError> {
        let session = |key: &str| profile.session.as_ref().and_then(|session| session.value(&[key]));
        let value = |key: &str| session(key).or_else(|| profile.value(key)).map(str::to_owned);
        let names_session = profile.value("sso_session");
        if names_session.is_none() && profile.value("sso_start_url").is_none() {
            return Ok(None);
        }
        let needed = |key: &str| {
            value(key).ok_or_else(|| {
                let what = format!("the AWS profile {}", profile.name);
                let within =
                    names_session.map_or_else(String::new, |name| format!(" and sso-session {name}"));
                let why = format!("has no {key}{within}; run `aws configure sso --profile {}`", profile.name);
                OriginError::invalid(what, why.replace(&within, ""))
            })
        };
        let home = var("HOME").map(PathBuf::from).unwrap_or_default();
        let region = needed("sso_region")?;
        if !region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            let what = format!("the AWS profile {}", profile.name);
            return Err(OriginError::invalid(what, "sso_region is not the name of a region"));
        }
        Ok(Some(SsoLogin {
            profile: profile.name.clone(),
            start_url: needed("sso_start_url")?,
            region,
            account: needed("sso_account_id")?,
            role: needed("sso_role_name")?,
            cache: home.join(".aws/sso/cache"),
            portal: var("AWS_ENDPOINT_URL_SSO"),
        }))
    }

    fn log_in_again(&self, why: &str) -> NoCredentials {
        let why = format!(
            "{why} for the AWS profile {name} ({start}): run `aws sso login --profile {name}`, then this \
             command again",
            name = self.profile,
            start = self.start_url
        );
        NoCredentials { why, transient: false }
    }

    /// Returns the token of the cache that is valid for longest.
    fn token(&self, now: SystemTime) -> Result<String, NoCredentials> {
        let files = std::fs::read_dir(&self.cache);
        let files = files.map_err(|_| self.log_in_again("there is no token of single sign-on"))?;
        let mut newest: Option<(SystemTime, String)> = None;
        let is_json = |path: &Path| path.extension().is_some_and(|end| end == "json");
        for path in files.filter_map(|file| Some(file.ok()?.path())).filter(|p| is_json(p)).take(FILES_MAX) {
            // A file that another program is writing, or of another form, is not the token.
            let Some(cached) = text(&path).ok().and_then(|t| serde_json::from_str::<CachedToken>(&t).ok())
            else {
                continue;
            };
            let same =
                |url: String| url.trim_end_matches(['/', '#']) == self.start_url.trim_end_matches(['/', '#']);
            if !cached.start_url.is_some_and(same) {
                continue;
            }
            let expires = cached.expires_at.as_deref().and_then(time::parse);
            if let (Some(token), Some(expires)) = (cached.access_token, expires)
                && newest.as_ref().is_none_or(|(other, _)| expires > *other)
            {
                newest = Some((expires, token));
            }
        }
        match newest {
            None => Err(self.log_in_again("there is no token of single sign-on")),
            Some((expires, _)) if expires <= now => {
                Err(self.log_in_again("the token of single sign-on has expired"))
            }
            Some((_, token)) => Ok(token),
        }
    }

    /// Exchanges the token for credentials.
    pub async fn fetch(&self, settings: &ClientSettings) -> Result<Fetched, NoCredentials> {
        let failed = |why: &str, transient| NoCredentials {
            why: format!("single sign-on of the AWS profile {}: {why}", self.profile),
            transient,
        };
        let token = self.token(SystemTime::now())?;
        let mut token = HeaderValue::from_str(&token).map_err(|_| failed("the token is no header", false))?;
        token.set_sensitive(true);
        let base = match &self.portal {
            Some(portal) => portal.trim_end_matches('/').to_owned(),
            None => format!("https://portal.sso.{}.amazonaws.com", self.region),
        };
        let mut url = url::Url::parse(&format!("{base}/federation/credentials"))
            .map_err(|_| failed("AWS_ENDPOINT_URL_SSO is no URL", false))?;
        url.query_pairs_mut().append_pair("role_name", &self.role).append_pair("account_id", &self.account);
        let client = settings.login_client(&url).map_err(|why| failed(&why, false))?;
        let request = client.get(url).header("x-amz-sso_bearer_token", token);
        let (status, body) = answer(request).await.map_err(|why| failed(&why, true))?;
        match status {
            200 => {}
            401 => return Err(self.log_in_again("the portal rejects the token of single sign-on")),
            403 => {
                let why = format!("the portal does not let you take the role {} (status 403)", self.role);
                return Err(failed(&why, false));
            }
            _ => {
                let transient = status >= 500 || status == 429;
                return Err(failed(&format!("the portal answered with status {status}"), transient));
            }
        }
        // The text of the parser's error would quote the answer.
        let got: Answer = serde_json::from_slice(&body)
            .map_err(|_| failed("the portal's answer has another form than expected", false))?;
        let RoleCredentials {
            access_key_id: key_id,
            secret_access_key: secret_key,
            session_token: token,
            expiration,
        } = got.role_credentials;
        let expires = expiration.and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
        Ok(Fetched { keys: Arc::new(AwsCredential { key_id, secret_key, token }), expires })
    }
}
