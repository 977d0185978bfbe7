// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// Bounds of answers that cannot be configured.
const (
	// maxErrorBytes bounds the body of an error response.
	maxErrorBytes = 64 << 10
	// maxAnswerItems bounds the items of a list, and maxAnswerObjects all JSON objects of an
	// answer, because an object of three bytes takes hundreds of bytes once it is decoded. A page
	// has pageSize items, each with some hundred objects, most of them managed fields.
	maxAnswerItems   = 4 * pageSize
	maxAnswerObjects = 100_000
	// maxRetryAfter bounds the delay that a tenant's API server may ask for.
	maxRetryAfter = 10 * time.Second
)

// traffic limits the traffic between the broker and one tenant's API server, for all clients
// together. Safe for concurrent use.
type traffic struct {
	tenant   string
	limits   Limits
	bytes    *rate.Limiter // of response bodies
	requests *rate.Limiter
	events   *rate.Limiter // of watch events
}

func newTraffic(tenant string, l Limits) *traffic {
	return &traffic{
		tenant: tenant, limits: l,
		bytes:    rate.NewLimiter(rate.Limit(l.BytesPerSecond), max(l.AnswerBytes, readSize)),
		requests: rate.NewLimiter(rate.Limit(l.RequestsPerSecond), l.RequestsPerSecond),
		events:   rate.NewLimiter(rate.Limit(l.RequestsPerSecond), l.RequestsPerSecond),
	}
}

// client returns the configuration of a limited client of the tenant's API server. All of its
// requests end with ctx.
func (t *traffic) client(ctx context.Context, config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.DisableCompression = true // a decompressor takes 40 kB for as long as a watch lasts
	config.QPS = -1                  // traffic limits the requests of all clients together
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.WarningHandlerWithContext = rest.NoWarnings{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &boundedTransport{t, ctx,
			next}
	})
	return config
}

// boundedTransport is the transport of a limited client.
type boundedTransport struct {
	*traffic
	lifetime context.Context
	next     http.RoundTripper
}

// WrappedRoundTripper lets client-go find and close idle connections.
func (b *boundedTransport) WrappedRoundTripper() http.RoundTripper { return b.next }

func (b *boundedTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(request.Context())
	stop := context.AfterFunc(b.lifetime, cancel)
	cancelAll := func() {
		stop()
		cancel()
	}

	if err := b.requests.Wait(ctx); err != nil {
		cancelAll()
		if request.Body != nil {
			_ = request.Body.Close()
		}
		return nil, fmt.Errorf("wait to ask the cluster of tenant %s: %w", b.tenant, err)
	}

	response, err := b.next.RoundTrip(request.WithContext(ctx))
	if err != nil {
		cancelAll()
		return nil, brief(err)
	}

	response.Body = &body{ReadCloser: response.Body, ctx: ctx, cancel: cancelAll,
		traffic: b.traffic}
	if err := b.check(request, response); err != nil {
		_ = response.Body.Close()
		return nil, err
	}

	return response, nil
}

// check rejects responses that no correct API server sends, and sets the limits for reading the
// others.
func (b *boundedTransport) check(request *http.Request, response *http.Response) error {
	response.Header.Del("Warning") // client-go would log it
	clampRetryAfter(response.Header)

	switch status := response.StatusCode; {
	case status < http.StatusOK || status >= 300 && status < 400:
		return misbehaves("the API server of tenant %s answers with status %d, to %q, and the "+
			"broker follows no redirects; "+
			"write the address of the API server itself into the kubeconfig's server",
			b.tenant, status, cutName(response.Header.Get("Location")))
	case status >= 400:
		return cutFailure(response)
	case status == http.StatusNoContent || response.ContentLength == 0:
		return nil
	}

	kind, _, err := mime.ParseMediaType(response.Header.Get("Content-Type"))
	if err != nil || kind != runtime.ContentTypeJSON {
		return misbehaves("the API server of tenant %s answers in %q in place of %s; see what is "+
			"at the kubeconfig's server",
			b.tenant, cutName(response.Header.Get("Content-Type")), runtime.ContentTypeJSON)
	}

	answer := response.Body.(*body)
	answer.meter = &meter{whole: request.URL.Query().Get("watch") == ""}
	if answer.meter.whole && response.ContentLength > int64(b.limits.AnswerBytes) {
		return answer.tooLarge()
	}

	return nil
}

// clampRetryAfter limits the delay that the response asks for to between 1 s and maxRetryAfter.
func clampRetryAfter(header http.Header) {
	const key = "Retry-After"
	if header.Get(key) == "" {
		return
	}

	seconds, err := strconv.Atoi(header.Get(key))
	if err != nil {
		seconds = 1
	}
	header.Set(key, strconv.Itoa(min(max(seconds, 1), int(maxRetryAfter.Seconds()))))
}

// cutFailure shortens an error response, because its texts end up in errors, conditions and logs.
func cutFailure(response *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(response.Body, maxErrorBytes))
	if err != nil {
		return brief(err)
	}
	if err := response.Body.Close(); err != nil {
		return brief(err)
	}

	var status metav1.Status
	if json.Unmarshal(text, &status) == nil && status.Kind == "Status" {
		cutStatus(&status)
		if text, err = json.Marshal(&status); err != nil {
			return fmt.Errorf("cut an error: %w", err)
		}
		response.Header.Set("Content-Type", runtime.ContentTypeJSON)
	} else {
		text = []byte(cut(string(text)))
		response.Header.Set("Content-Type", "text/plain")
	}

	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	response.Header.Set("Content-Length", strconv.Itoa(len(text)))

	return nil
}

// cutStatus keeps the fields of an error that the broker reads, shortened, and one message.
func cutStatus(status *metav1.Status) {
	status.Message = cut(status.Message)
	status.Reason = metav1.StatusReason(cutName(string(status.Reason)))
	status.Status = cutName(status.Status)
	status.ListMeta = metav1.ListMeta{}
	if details := status.Details; details != nil {
		wait := min(max(details.RetryAfterSeconds, 0), int32(maxRetryAfter.Seconds()))
		status.Details = &metav1.StatusDetails{
			Name: cutName(details.Name), Kind: cutName(details.Kind), RetryAfterSeconds: wait,
		}
		for _, cause := range details.Causes {
			// A conflict of UIDs or resource versions is recognized by its causes.
			if len(status.Details.Causes) < 8 {
				cause = metav1.StatusCause{
					Type:  metav1.CauseType(cutName(string(cause.Type))),
					Field: cutName(cause.Field),
				}
				status.Details.Causes = append(status.Details.Causes, cause)
			}
		}
	}
}

// readSize is how many bytes of a response are read at once.
const readSize = 64 << 10

// body is the body of a response. Closing it ends the request.
type body struct {
	io.ReadCloser
	*traffic
	ctx    context.Context
	cancel func()
	meter  *meter // nil for a response that is already bounded
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), readSize)])
	if waited := b.bytes.WaitN(b.ctx, n); waited != nil {
		return 0, fmt.Errorf("read the answer of tenant %s: %w", b.tenant, waited)
	}
	if b.meter == nil {
		return n, err
	}

	b.meter.read(p[:n])
	if refused := b.exceeded(); refused != nil {
		if report, ok := b.ctx.Value(reportKey{}).(func(error)); ok {
			report(refused)
		}
		return 0, refused
	}

	return n, err
}

// reportKey is the context key of a function that gets the reason why a response was not read to
// its end. It is needed because the decoder of a watch keeps only the text of an error.
type reportKey struct{}

func reporting(ctx context.Context, report func(error)) context.Context {
	return context.WithValue(ctx, reportKey{}, report)
}

// exceeded returns an error if the response has exceeded a limit.
func (b *body) exceeded() error {
	switch m := b.meter; {
	case m.bytes > b.limits.AnswerBytes:
		return b.tooLarge()
	case m.items > maxAnswerItems:
		return tooMuch("the API server of tenant %s answers with a list of more than %d objects "+
			"where %d were asked for; "+
			"see what is at the kubeconfig's server", b.tenant, maxAnswerItems, pageSize)
	case m.objects > maxAnswerObjects:
		return tooMuch("the API server of tenant %s answers with more than %d JSON objects at "+
			"once; see which of its "+
			"XPUPorts, XPUNetworks, XPUNodes and XPUs is so large", b.tenant, maxAnswerObjects)
	}
	return nil
}

func (b *body) tooLarge() error {
	return tooMuch("the API server of tenant %s answers with more than %d bytes at once; see "+
		"which of its XPUPorts, "+
		"XPUNetworks, XPUNodes and XPUs is so large, or start the broker with a larger "+
		"--tenant-answer-bytes",
		b.tenant, b.limits.AnswerBytes)
}

func (b *body) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}

// meter measures JSON before it is decoded. In a watch, which is a stream of events, it measures
// the current event only.
type meter struct {
	whole bool // the body is one JSON value, not a stream

	bytes, objects int
	items          int // objects in an array of the outermost object

	depth           int
	inArray         bool // in an array of the outermost object
	inText, escaped bool
}

// read processes the next bytes.
func (m *meter) read(p []byte) {
	for _, c := range p {
		m.bytes++
		switch {
		case m.escaped:
			m.escaped = false
		case m.inText:
			m.inText, m.escaped = c != '"', c == '\\'
		case c == '"':
			m.inText = true
		case c == '{', c == '[':
			m.open(c)
		case c == '}', c == ']':
			if m.depth--; m.depth <= 0 && !m.whole {
				*m = meter{}
			}
		}
	}
}

func (m *meter) open(c byte) {
	m.depth++
	if m.depth == 2 {
		m.inArray = c == '['
	}

	if c != '{' {
		return
	}

	m.objects++
	if m.depth == 3 && m.inArray {
		m.items++
	}
}
