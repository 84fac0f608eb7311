//! The form of `~/.aws/config`, `~/.aws/credentials` and Fletch's own credentials files.
//!
//! A file has sections of lines `key = value`. A key without a value may have keys of its own: the indented
//! lines below it. Such a key is named `above.key`.

use std::collections::BTreeMap;

/// Returns the values of the sections with one of these names; `None` if there is no such section.
///
/// Keys are in lower case. The lines before any section belong to `default`.
pub(crate) fn section(text: &str, names: &[&str]) -> Option<BTreeMap<String, String>> {
    let is_ours = |name: &str| names.contains(&name);
    let mut values = BTreeMap::new();
    let (mut ours, mut found) = (is_ours("default"), false);
    let mut above: Option<String> = None;
    for raw in text.lines() {
        let line = raw.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().unwrap_or(name);
            ours = is_ours(&name.split_whitespace().collect::<Vec<_>>().join(" "));
            found |= ours;
            above = None;
            continue;
        }
        let (true, Some((key, value))) = (ours, line.split_once('=')) else { continue };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        if !raw.starts_with([' ', '\t']) {
            above = value.is_empty().then(|| key.clone());
        }
        if !value.is_empty() {
            found = true;
            let key = above.as_ref().map_or_else(|| key.clone(), |above| format!("{above}.{key}"));
            values.insert(key, value.to_owned());
        }
    }
    found.then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_keys_and_keys_below_keys_are_read() {
        let text = "k = before\n# [work]\n[profile  work ] ; mine\nRegion=eu\n s3 = x\ns3 =\n \
                    addressing_style = virtual\n\
                    \n  max = 2\noutput = json\n[sso-session work]\nregion = us\n[empty]\n";
        let work = section(text, &["work", "profile work"]).expect("a section");
        let get = |key: &str| work.get(key).map(String::as_str);
        assert_eq!((get("region"), get("s3.addressing_style")), (Some("eu"), Some("virtual")));
        assert_eq!((get("s3.max"), get("output"), get("k")), (Some("2"), Some("json"), None));
        assert_eq!(section(text, &["default"]).expect("lines before any section")["k"], "before");
        assert_eq!(section(text, &["empty"]), Some(BTreeMap::new()));
        assert_eq!(section(text, &["none"]), None);
    }
}
