# Chromium for the tests of the dashboard, where it is missing and this may install it; without it they are skipped.
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium > /dev/null; then
    exit 0
  fi
fi
echo "no Chromium: the tests of the dashboard are skipped; install the package chromium to run them" >&2
