//! Keeps the credentials of a login until they expire. The clients of a process share them, so that a program
//! that asks a person for a code runs once.

use super::{Login, process};
use crate::transport::ClientSettings;
use crate::transport::credentials_client::NoCredentials;
use http_body_util::{BodyExt as _, Limited};
use object_store::aws::AwsCredential;
use object_store::{CredentialProvider, Error};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// How long before their end credentials are fetched again.
const EARLY: Duration = Duration::from_secs(300);
/// The shortest time between two logins whose credentials last no longer than [`EARLY`], or that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// The longest time of a request for credentials.
const WITHIN: Duration = Duration::from_secs(20);
/// The most bytes of an answer with credentials.
const ANSWER_BYTES_MAX: usize = 256 << 10;
/// The most logins of a process. Changed files make new ones.
const LOGINS_MAX: usize = 64;

/// Credentials of a login, and when they expire, if that is known.
#[derive(Clone)]
pub(crate) struct Fetched {
    pub keys: Arc<AwsCredential>,
    pub expires: Option<SystemTime>,
}

impl fmt::Debug for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fetched(redacted, expires: {:?})", self.expires)
    }
}

#[derive(Debug, Default)]
struct Held {
    fetched: Option<Fetched>,
    /// The login that runs. A caller that gives up leaves it to the next one.
    running: Option<JoinHandle<Result<Fetched, NoCredentials>>>,
    /// When the last login ended, and its error.
    last: Option<(Instant, Option<NoCredentials>)>,
}

/// The credentials of a login.
#[derive(Debug)]
pub(crate) struct LoginProvider {
    login: Login,
    settings: ClientSettings,
    held: tokio::sync::Mutex<Held>,
}

impl LoginProvider {
    /// Returns the provider of a login. All callers of the process with these arguments get the same one.
    pub fn shared(login: &Login, settings: &ClientSettings) -> Arc<LoginProvider> {
        static ALL: Mutex<BTreeMap<(Login, ClientSettings), Arc<LoginProvider>>> =
            Mutex::new(BTreeMap::new());
        let mut all = ALL.lock();
        let key = (login.clone(), settings.clone());
        if !all.contains_key(&key) && all.len() >= LOGINS_MAX {
            all.clear();
        }
        let new = || {
            let (login, settings) = key.clone();
            Arc::new(LoginProvider { login, settings, held: tokio::sync::Mutex::default() })
        };
        Arc::clone(all.entry(key.clone()).or_insert_with(new))
    }

    /// Returns credentials that are valid. Logs in if there are none, or if they expire soon.
    pub async fn get(&self) -> Result<Fetched, NoCredentials> {
        let mut held = self.held.lock().await;
        let now = SystemTime::now();
        let valid = |fetched: &Fetched, for_at_least: Duration| match fetched.expires {
            None => true,
            Some(at) => at > now + for_at_least,
        };
        if let Some(fetched) = held.fetched.as_ref().filter(|f| valid(f, EARLY)) {
            return Ok(fetched.clone());
        }
        let usable = held.fetched.clone().filter(|f| valid(f, Duration::ZERO));
        if held.running.is_none()
            && let Some((at, error)) = &held.last
            && at.elapsed() < PAUSE
        {
            match (usable, error) {
                (Some(usable), _) => return Ok(usable),
                (None, Some(error)) => return Err(error.clone()),
                (None, None) => {}
            }
        }
        let running = held.running.get_or_insert_with(|| self.start());
        let ended = running.await;
        held.running = None;
        let got = ended.unwrap_or_else(|_| {
            Err(NoCredentials { why: "the login was cancelled".to_owned(), transient: true })
        });
        held.last = Some((Instant::now(), got.as_ref().err().cloned()));
        match got {
            Ok(fetched) if valid(&fetched, Duration::ZERO) => {
                held.fetched = Some(fetched.clone());
                Ok(fetched)
            }
            Ok(_) => {
                let why = "the login returned credentials that have expired already; log in again".to_owned();
                let error = NoCredentials { why, transient: false };
                held.last = Some((Instant::now(), Some(error.clone())));
                Err(error)
            }
            // The older credentials are still valid.
            Err(error) => match held.fetched.clone().filter(|f| valid(f, Duration::ZERO)) {
                Some(usable) => {
                    tracing::warn!(%error, "a login failed; the older credentials stay in use");
                    Ok(usable)
                }
                None => Err(error),
            },
        }
    }

    /// Starts the login on a thread that may block.
    fn start(&self) -> JoinHandle<Result<Fetched, NoCredentials>> {
        let (login, settings, runtime) = (self.login.clone(), self.settings.clone(), Handle::current());
        tokio::task::spawn_blocking(move || match login {
            Login::Process { profile, command } => process::run(&profile, &command),
            Login::Sso(login) => runtime.block_on(login.fetch(&settings)),
            Login::WebIdentity(login) => runtime.block_on(login.fetch(&settings)),
        })
    }
}

/// [`LoginProvider`] in the form that `object_store` takes.
#[derive(Debug)]
pub(crate) struct LoginCredentials(pub Arc<LoginProvider>);

#[async_trait::async_trait]
impl CredentialProvider for LoginCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let got = self.0.get().await;
        let got = got.map_err(|error| Error::Generic { store: "credentials", source: Box::new(error) })?;
        Ok(got.keys)
    }
}

/// Sends a request for credentials. Returns the status and the body of the answer, or what failed.
pub(super) async fn answer(request: reqwest::RequestBuilder) -> Result<(u16, Vec<u8>), String> {
    let asked = async {
        let response = request.send().await.map_err(|e| format!("no answer: {}", deepest(&e)))?;
        let status = response.status().as_u16();
        let body = Limited::new(reqwest::Body::from(response), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|_| "the answer cannot be read, or is too long".to_owned())?;
        Ok((status, body.to_bytes().to_vec()))
    };
    let late = |_| format!("no answer within {WITHIN:?}");
    tokio::time::timeout(WITHIN, asked).await.map_err(late)?
}

/// Returns the innermost cause, which has no URL.
fn deepest(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |e| e.source()).last().map(ToString::to_string).unwrap_or_default()
}
