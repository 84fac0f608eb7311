//! The files that AWS's own tools share: `~/.aws/config` and `~/.aws/credentials`.
//!
//! The one reader of these files. Variables come through [`Variables`], so that a test can choose them.
//!
//! 1. No error, log line or `Debug` output has a value of a secret, or the command of a `credential_process`.
//! 2. A program runs only for the settings and the environment of this process, never for what a user handed
//!    over: the caller asks [`chain`], and what a user hands over never gets there.

pub(crate) mod ini;
mod process;
pub(crate) mod provider;
mod sso;
mod time;
mod web_identity;

use crate::credentials::{Profile, text};
use crate::{OriginConfig, OriginError};
use provider::LoginProvider;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Reads a variable of the environment. Returns `None` for an empty one.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The keys that a store takes.
const KEYS: [&str; 3] = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];

/// A profile of AWS's shared files, as the environment selects it.
#[derive(Debug, Clone)]
pub struct AwsProfile {
    name: String,
    /// Whether a variable names the profile.
    is_named: bool,
    shared: Option<(PathBuf, Option<Profile>)>,
    config: Option<(PathBuf, Option<Profile>)>,
    /// The settings of the service that the profile's `services` section has for S3.
    service: Option<Profile>,
    /// The section of the profile's `sso_session`.
    session: Option<Profile>,
}

/// How to get credentials that are not written down, as a profile says.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Login {
    /// Run a program that prints them.
    Process { profile: String, command: String },
    /// Exchange the token that `aws sso login` left.
    Sso(sso::SsoLogin),
    /// Exchange a token in a file.
    WebIdentity(web_identity::WebIdentityLogin),
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Login::Process { .. } => "Process(redacted)",
            Login::Sso(_) => "Sso(redacted)",
            Login::WebIdentity(_) => "WebIdentity(redacted)",
        })
    }
}

/// Where the environment has the credentials of S3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AwsChain {
    /// In variables: keys, or the place of a web identity.
    Variables,
    /// In a file, below a profile.
    File { path: PathBuf, profile: String },
    /// Behind a login.
    Login(Login),
    /// At most at the identity of the machine. The text lists the places that have none.
    Machine { looked_at: String },
}

/// The keys of S3 in the form that a server takes.
#[derive(Clone, PartialEq, Eq)]
pub struct AwsKeys {
    /// By the names of the keys of a credentials file.
    pub secrets: BTreeMap<String, String>,
    /// When they expire, if that is known.
    pub expires: Option<SystemTime>,
}

impl fmt::Debug for AwsKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AwsKeys(redacted, expires: {:?})", self.expires)
    }
}

impl AwsProfile {
    /// Reads the profile of the environment. Files that do not exist have no profile.
    ///
    /// # Errors
    /// A file cannot be read. The error names it.
    pub fn load(var: Variables<'_>) -> Result<AwsProfile, OriginError> {
        let named = var("AWS_PROFILE").or_else(|| var("AWS_DEFAULT_PROFILE"));
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let shared = file(var, "AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials")?;
        let config = file(var, "AWS_CONFIG_FILE", ".aws/config")?;
        let of_config = |names: &[&str]| {
            let (_, text) = config.as_ref()?;
            ini::section(text, names).map(Profile::of)
        };
        let in_config = of_config(&[&format!("profile {name}"), &name]);
        let section_of = |key: &str, kind: &str| {
            let name = in_config.as_ref()?.value(&[key])?;
            of_config(&[&format!("{kind} {name}")])
        };
        let (service, session) =
            (section_of("services", "services"), section_of("sso_session", "sso-session"));
        let in_shared = shared.map(|(path, text)| (path, ini::section(&text, &[&name]).map(Profile::of)));
        let config = config.as_ref().map(|(path, _)| (path.clone(), in_config));
        Ok(AwsProfile { name, is_named: named.is_some(), shared: in_shared, config, service, session })
    }

    /// Returns a value of the profile. The file with credentials comes first.
    fn value(&self, key: &str) -> Option<&str> {
        let profiles = [&self.shared, &self.config].into_iter().filter_map(|file| file.as_ref()?.1.as_ref());
        profiles.filter_map(|profile| profile.value(&[key])).next()
    }

    /// Returns whether one of the files has the profile.
    #[must_use]
    pub fn exists(&self) -> bool {
        [&self.shared, &self.config].iter().any(|file| matches!(file, Some((_, Some(_)))))
    }

    /// Returns the region of the profile.
    #[must_use]
    pub fn region(&self) -> Option<String> {
        self.value("region").map(str::to_owned)
    }

    /// Returns the endpoint of S3 in the profile; `None` if the profile says to ignore it.
    #[must_use]
    pub fn endpoint(&self) -> Option<String> {
        let of_service = self.service.as_ref().and_then(|section| section.value(&["s3.endpoint_url"]));
        of_service.or_else(|| self.value("endpoint_url")).map(str::to_owned)
    }

    /// Returns whether the profile says to ignore configured endpoints.
    #[must_use]
    pub fn ignores_endpoints(&self) -> bool {
        self.value("ignore_configured_endpoint_urls").is_some_and(|v| v.eq_ignore_ascii_case("true"))
    }

    /// Returns whether requests name the bucket in the host. `None` for `auto`, and without the key.
    #[must_use]
    pub fn virtual_hosted(&self) -> Option<bool> {
        match self.value("s3.addressing_style")? {
            "virtual" => Some(true),
            "path" => Some(false),
            _ => None,
        }
    }

    /// Returns the PEM file with authorities that the profile names.
    #[must_use]
    pub fn ca_bundle(&self) -> Option<PathBuf> {
        self.value("ca_bundle").map(PathBuf::from)
    }

    fn places(&self) -> String {
        let shown = |file: &Option<(PathBuf, Option<Profile>)>, default: &str| {
            file.as_ref().map_or_else(|| default.to_owned(), |(path, _)| path.display().to_string())
        };
        let shared = shown(&self.shared, "~/.aws/credentials");
        let config = shown(&self.config, "~/.aws/config");
        format!("{shared} profile {name}, {config} profile {name}", name = self.name)
    }

    /// Returns how to get the credentials of the profile. `None` if it has none.
    fn source(&self, var: Variables<'_>) -> Result<Option<AwsChain>, OriginError> {
        let invalid = |why: String| Err(OriginError::invalid(format!("the AWS profile {}", self.name), why));
        if !self.exists() {
            return match self.is_named {
                true => invalid(format!(
                    "does not exist (looked at {}); correct AWS_PROFILE: `aws configure list-profiles` lists \
                     the profiles",
                    self.places()
                )),
                false => Ok(None),
            };
        }
        if let Some(role) = self.value("role_arn") {
            return match self.value("web_identity_token_file") {
                Some(token) => {
                    let login = web_identity::WebIdentityLogin {
                        profile: self.name.clone(),
                        role: role.to_owned(),
                        token: PathBuf::from(token),
                        session: self.value("role_session_name").unwrap_or("fletch").to_owned(),
                        region: var("AWS_REGION").or_else(|| self.region()),
                        endpoint: var("AWS_ENDPOINT_URL_STS"),
                    };
                    Ok(Some(AwsChain::Login(Login::WebIdentity(login))))
                }
                None => invalid(format!(
                    "assumes a role (role_arn with source_profile or credential_source), which Fletch does \
                     not do itself; let AWS's command do it: eval \"$(aws configure export-credentials \
                     --profile {} --format env)\", then run this command again",
                    self.name
                )),
            };
        }
        if let Some(login) = sso::SsoLogin::of(self, var)? {
            return Ok(Some(AwsChain::Login(Login::Sso(login))));
        }
        let has_keys = |file: &Option<(PathBuf, Option<Profile>)>| match file {
            Some((path, Some(profile))) if profile.value(&KEYS[..2]).is_some() => Some(path.clone()),
            _ => None,
        };
        let in_file = |path| AwsChain::File { path, profile: self.name.clone() };
        if let Some(path) = has_keys(&self.shared) {
            return Ok(Some(in_file(path)));
        }
        if let Some(command) = self.value("credential_process") {
            let (profile, command) = (self.name.clone(), command.to_owned());
            return Ok(Some(AwsChain::Login(Login::Process { profile, command })));
        }
        Ok(has_keys(&self.config).map(in_file))
    }
}

/// Reads a file of AWS's tools; `None` if it does not exist.
fn file(var: Variables<'_>, name: &str, below: &str) -> Result<Option<(PathBuf, String)>, OriginError> {
    let home = || var("HOME").map(PathBuf::from);
    let path = match var(name) {
        Some(path) => match (path.strip_prefix("~/"), home()) {
            (Some(rest), Some(home)) => Some(home.join(rest)),
            _ => Some(PathBuf::from(path)),
        },
        None => home().map(|home| home.join(below)),
    };
    // A file that cannot be looked at is read, and the error says why.
    let is_absent =
        |path: &Path| matches!(std::fs::metadata(path), Err(e) if e.kind() == std::io::ErrorKind::NotFound);
    match path.filter(|path| !is_absent(path)) {
        Some(path) => {
            let text = text(&path)?;
            Ok(Some((path, text)))
        }
        None => Ok(None),
    }
}

/// Finds the credentials of S3, in the order of AWS's own tools.
///
/// # Errors
/// A file cannot be read, or the profile gets its credentials in a way that Fletch does not know. The error
/// says what to do instead.
pub(crate) fn chain(var: Variables<'_>) -> Result<AwsChain, OriginError> {
    if var("AWS_ACCESS_KEY_ID").is_some() {
        return Ok(AwsChain::Variables);
    }
    if var("AWS_WEB_IDENTITY_TOKEN_FILE").is_some() && var("AWS_ROLE_ARN").is_some() {
        return Ok(AwsChain::Variables);
    }
    let profile = AwsProfile::load(var)?;
    let found = profile.source(var)?;
    let looked_at =
        || format!("AWS_ACCESS_KEY_ID, AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN, {}", profile.places());
    Ok(found.unwrap_or_else(|| AwsChain::Machine { looked_at: looked_at() }))
}

/// Returns the keys of S3 that the environment has: in variables, in a file, or behind a login.
///
/// Runs the program of a `credential_process`. `None`: at most the identity of the machine has credentials.
/// `config` says how to reach the services of a login. Blocks, and must be called within a runtime, but not
/// by one of its tasks.
///
/// # Errors
/// As the chain of credentials; or a login failed, with what to do.
pub fn aws_keys(config: &OriginConfig, var: Variables<'_>) -> Result<Option<AwsKeys>, OriginError> {
    match chain(var)? {
        AwsChain::Variables if var("AWS_ACCESS_KEY_ID").is_some() => {
            let value = |key: &&str| Some(((*key).to_owned(), var(&key.to_ascii_uppercase())?));
            let secrets: BTreeMap<String, String> = KEYS.iter().filter_map(value).collect();
            let names = ["AWS_CREDENTIAL_EXPIRATION", "AWS_SESSION_EXPIRATION"];
            let expires = names.iter().find_map(|name| var(name)).and_then(|text| time::parse(&text));
            let expires = expires.filter(|_| secrets.contains_key("aws_session_token"));
            Ok(Some(AwsKeys { secrets, expires }))
        }
        AwsChain::Variables | AwsChain::Machine { .. } => Ok(None),
        AwsChain::File { path, profile } => {
            let found = Profile::load(&path, &profile)?;
            let secrets = found.iter().filter(|(key, _)| KEYS.contains(key));
            let secrets = secrets.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
            Ok(Some(AwsKeys { secrets, expires: None }))
        }
        AwsChain::Login(login) => {
            let provider = LoginProvider::shared(&login, &config.client_settings()?);
            let what = format!("the credentials of {}", config.prefix);
            let failed = |why: String| OriginError::Denied { what: what.clone(), why };
            let runtime = tokio::runtime::Handle::try_current().map_err(|e| failed(e.to_string()))?;
            let got = runtime.block_on(provider.get()).map_err(|e| failed(e.why))?;
            let values = [Some(&got.keys.key_id), Some(&got.keys.secret_key), got.keys.token.as_ref()];
            let some =
                KEYS.iter().zip(values).filter_map(|(key, value)| Some(((*key).to_owned(), value?.clone())));
            Ok(Some(AwsKeys { secrets: some.collect(), expires: got.expires }))
        }
    }
}

#[cfg(test)]
mod tests;
