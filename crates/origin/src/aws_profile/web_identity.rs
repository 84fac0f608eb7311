//! Profiles with a web identity: exchanges a token in a file for credentials (STS, API version 2011-06-15).

use super::provider::{Fetched, answer};
use super::time;
use crate::credentials::text;
use crate::transport::ClientSettings;
use crate::transport::credentials_client::NoCredentials;
use object_store::aws::AwsCredential;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// A profile with a web identity.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WebIdentityLogin {
    pub profile: String,
    pub role: String,
    pub token: PathBuf,
    pub session: String,
    pub region: Option<String>,
    /// The base URL of the token service, in place of AWS's own.
    pub endpoint: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "AssumeRoleWithWebIdentityResult")]
    result: AssumedRole,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumedRole {
    credentials: Credentials,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Credentials {
    access_key_id: String,
    secret_access_key: String,
    session_token: String,
    expiration: String,
}

impl WebIdentityLogin {
    /// Exchanges the token for credentials.
    pub async fn fetch(&self, settings: &ClientSettings) -> Result<Fetched, NoCredentials> {
        let failed = |why: String, transient| NoCredentials {
            why: format!("the web identity of the AWS profile {}: {why}", self.profile),
            transient,
        };
        let token = text(&self.token).map_err(|e| failed(e.to_string(), false))?;
        let base = match (&self.endpoint, &self.region) {
            (Some(endpoint), _) => endpoint.clone(),
            (None, Some(region)) => format!("https://sts.{region}.amazonaws.com"),
            (None, None) => "https://sts.amazonaws.com".to_owned(),
        };
        let url = url::Url::parse(&base)
            .map_err(|_| failed(format!("{base} is no URL of a token service"), false))?;
        let client = settings.login_client(&url).map_err(|why| failed(why, false))?;
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        form.append_pair("Action", "AssumeRoleWithWebIdentity").append_pair("Version", "2011-06-15");
        form.append_pair("RoleArn", &self.role).append_pair("RoleSessionName", &self.session);
        form.append_pair("WebIdentityToken", token.trim());
        let request = client.post(url).header("content-type", "application/x-www-form-urlencoded");
        let (status, body) = answer(request.body(form.finish())).await.map_err(|why| failed(why, true))?;
        if status != 200 {
            let transient = status >= 500 || status == 429;
            return Err(failed(format!("the token service answered with status {status}"), transient));
        }
        let other_form =
            || failed("the token service's answer has another form than expected".to_owned(), false);
        let body = std::str::from_utf8(&body).map_err(|_| other_form())?;
        // The text of the parser's error would quote the answer.
        let got: Answer = quick_xml::de::from_str(body).map_err(|_| other_form())?;
        let got = got.result.credentials;
        let expires = time::parse(&got.expiration).ok_or_else(other_form)?;
        let keys = AwsCredential {
            key_id: got.access_key_id,
            secret_key: got.secret_access_key,
            token: Some(got.session_token),
        };
        Ok(Fetched { keys: Arc::new(keys), expires: Some(expires) })
    }
}
