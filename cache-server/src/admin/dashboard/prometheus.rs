//! Histories that are longer than the server's memory: fixed queries to the Prometheus of the settings.
//!
//! 1. A caller chooses a range, never a query.
//! 2. A call follows no redirect, reads no proxy variable, and ends after [`TIMEOUT`]. Its answer has at most
//!    [`BYTES_MAX`]. At most [`CALLS_MAX`] calls run at once.
//! 3. No error has text of the answer.

use fletch_api::dashboard::{DashboardHistory, HistorySeries, HistorySource};
use futures::future::try_join_all;
use serde::Deserialize;
use std::{collections::BTreeMap, str::FromStr, time::Duration};
use tokio::sync::Semaphore;
use url::Url;

/// The longest time for all queries of one history.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer to a query.
const BYTES_MAX: usize = 1 << 20;
/// The most histories at once.
const CALLS_MAX: usize = 4;
/// The times of a history.
const POINTS: u64 = 240;

/// The queries, by the name of their series. `$w` is the width of a rate.
const QUERIES: [(&str, &str); 4] = [
    ("delivered", "sum(rate(fletch_bytes_total[$w]))"),
    ("origin", "sum(rate(fletch_origin_read_bytes_total[$w]))"),
    ("avoided", "sum(rate(fletch_avoided_bytes_total[$w]))"),
    ("errors", "sum(rate(fletch_requests_total{status=~\"5..\"}[$w]))"),
];

/// A range that ends now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// 6 hours.
    SixHours,
    /// A day.
    Day,
    /// 7 days.
    Week,
    /// 30 days.
    Month,
}

impl Range {
    /// Returns the range of a word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "6h" => Some(Range::SixHours),
            "24h" => Some(Range::Day),
            "7d" => Some(Range::Week),
            "30d" => Some(Range::Month),
            _ => None,
        }
    }

    fn seconds(self) -> u64 {
        match self {
            Range::SixHours => 6 * 3600,
            Range::Day => 24 * 3600,
            Range::Week => 7 * 24 * 3600,
            Range::Month => 30 * 24 * 3600,
        }
    }
}

/// Why the URL of the settings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It is no URL.
    #[error("{0:?} is not a URL; write http://HOST:PORT")]
    NotUrl(String),
    /// It has a part that it must not have.
    #[error(
        "the URL must be http or https, without user, password, query and fragment; write http://HOST:PORT"
    )]
    Parts,
}

/// Why a history could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PrometheusError {
    /// Too many histories are being read.
    #[error("{CALLS_MAX} other histories are being read from Prometheus")]
    Busy,
    /// There is no answer in time.
    #[error("Prometheus did not answer in {} s", TIMEOUT.as_secs())]
    Late,
    /// Nothing answers.
    #[error("Prometheus cannot be reached: the connection failed")]
    Unreachable,
    /// It answers with another status, such as a redirect.
    #[error("Prometheus answered with the status {0}")]
    Status(u16),
    /// The answer is too long.
    #[error("the answer of Prometheus has more than {BYTES_MAX} bytes")]
    TooLong,
    /// The answer is not one of Prometheus.
    #[error("what answers does not speak the API of Prometheus")]
    NotPrometheus,
}

/// Where a Prometheus takes range queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrometheusUrl(Url);

impl FromStr for PrometheusUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let mut url = Url::parse(text).map_err(|_| UrlError::NotUrl(text.to_owned()))?;
        let has_more = url.query().is_some() || url.fragment().is_some();
        let has_user = !url.username().is_empty() || url.password().is_some();
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() || has_user || has_more {
            return Err(UrlError::Parts);
        }
        let base = url.path().trim_end_matches('/').to_owned();
        url.set_path(&format!("{base}/api/v1/query_range"));
        Ok(PrometheusUrl(url))
    }
}

/// A Prometheus that has scraped this server.
#[derive(Debug)]
pub struct Prometheus {
    url: PrometheusUrl,
    client: reqwest::Client,
    calls: Semaphore,
}

/// The answer to a range query.
#[derive(Deserialize)]
struct Answer {
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    result: Vec<Matrix>,
}

/// A series: times in seconds since 1970, and values as texts.
#[derive(Deserialize)]
struct Matrix {
    values: Vec<(f64, String)>,
}

impl Prometheus {
    /// Returns a client of the Prometheus at a URL.
    ///
    /// # Errors
    /// If the system has no usable TLS certificates.
    pub fn new(url: PrometheusUrl) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy();
        let client = client.timeout(TIMEOUT).build()?;
        Ok(Prometheus { url, client, calls: Semaphore::new(CALLS_MAX) })
    }

    /// Reads the history of a range that ends at `now_s`, in seconds since 1970.
    ///
    /// # Errors
    /// [`PrometheusError`].
    pub async fn history(&self, range: Range, now_s: u64) -> Result<DashboardHistory, PrometheusError> {
        let _permit = self.calls.try_acquire().map_err(|_| PrometheusError::Busy)?;
        let step = range.seconds() / POINTS;
        // Whole steps, so that a reload asks for the same times.
        let end = now_s - now_s % step;
        let times: Vec<u64> = (0..=POINTS).rev().map(|i| end.saturating_sub(i * step)).collect();
        let reads = QUERIES.map(|(_, query)| self.values(query, &times, step));
        let read = tokio::time::timeout(TIMEOUT, try_join_all(reads)).await;
        let values = read.map_err(|_| PrometheusError::Late)??;
        let series = QUERIES.iter().zip(values);
        let series = series.map(|((name, _), values)| HistorySeries { name: (*name).to_owned(), values });
        let times = times.into_iter().map(|t| t as f64).collect();
        Ok(DashboardHistory { source: HistorySource::Prometheus, times, series: series.collect() })
    }

    async fn values(
        &self,
        query: &str,
        times: &[u64],
        step: u64,
    ) -> Result<Vec<Option<f64>>, PrometheusError> {
        let failed = |e: reqwest::Error| match e.is_timeout() {
            true => PrometheusError::Late,
            false => PrometheusError::Unreachable,
        };
        // A rate needs some scrapes: at least five minutes, as scrapes are at most a minute apart.
        let width = format!("{}s", (2 * step).max(300));
        let (start, end) = (times.first().copied().unwrap_or(0), times.last().copied().unwrap_or(0));
        let mut url = self.url.0.clone();
        url.query_pairs_mut()
            .append_pair("query", &query.replace("$w", &width))
            .append_pair("start", &start.to_string())
            .append_pair("end", &end.to_string())
            .append_pair("step", &step.to_string());
        let mut response = self.client.get(url).send().await.map_err(failed)?;
        if response.status() != reqwest::StatusCode::OK {
            return Err(PrometheusError::Status(response.status().as_u16()));
        }
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(failed)? {
            if body.len() + piece.len() > BYTES_MAX {
                return Err(PrometheusError::TooLong);
            }
            body.extend_from_slice(&piece);
        }
        let answer: Answer = serde_json::from_slice(&body).map_err(|_| PrometheusError::NotPrometheus)?;
        let values = answer.data.result.first().map(|m| m.values.as_slice()).unwrap_or_default();
        let value = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite());
        let known: BTreeMap<u64, Option<f64>> =
            values.iter().map(|(t, text)| (t.round() as u64, value(text))).collect();
        Ok(times.iter().map(|t| known.get(t).copied().flatten()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_has_a_host_and_nothing_secret() {
        for good in ["http://prometheus:9090", "https://metrics.example/prometheus/"] {
            let url = good.parse::<PrometheusUrl>().expect(good).0;
            assert!(url.path().ends_with("/api/v1/query_range") && !url.path().contains("//"), "{url}");
        }
        assert_eq!("prometheus".parse::<PrometheusUrl>().err(), Some(UrlError::NotUrl("prometheus".into())));
        for bad in [
            "ftp://prometheus",
            "file:///etc/passwd",
            "http://user:secret@prometheus",
            "http://prometheus/?query=up",
            "http://prometheus/#x",
        ] {
            let error = bad.parse::<PrometheusUrl>().err();
            assert_eq!(error, Some(UrlError::Parts), "{bad}");
            assert!(!error.map(|e| e.to_string()).unwrap_or_default().contains("secret"));
        }
    }

    #[test]
    fn a_range_is_one_of_four_words() {
        let known = ["6h", "24h", "7d", "30d"].map(|w| Range::from_word(w).map(Range::seconds));
        assert_eq!(known, [Some(21_600), Some(86_400), Some(604_800), Some(2_592_000)]);
        for word in ["", "1h", "8d", "6h\n", "up"] {
            assert_eq!(Range::from_word(word), None, "{word:?}");
        }
    }
}
