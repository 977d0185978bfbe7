// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// kindsPatience bounds each request for the kinds of a cluster, unless --request-timeout does.
// Clients of package discovery of client-go have the same bound (defaultTimeout).
const kindsPatience = 32 * time.Second

// newMapper returns what knows the kinds that a cluster serves. It asks for them when the first is
// needed. controller-runtime asks without a context, so that the requests end with ctx instead.
func newMapper(ctx context.Context, config *rest.Config) (meta.RESTMapper, error) {
	config = rest.CopyConfig(config)
	config.Timeout = cmp.Or(config.Timeout, kindsPatience)
	config.Wrap(func(base http.RoundTripper) http.RoundTripper { return endsWith{ctx, base} })

	api, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	return apiutil.NewDynamicRESTMapper(config, api)
}

// endsWith makes requests that end with a context beside their own.
type endsWith struct {
	ctx  context.Context
	base http.RoundTripper
}

// RoundTrip makes a request, whose answer can be read until one of the two contexts ends.
func (e endsWith) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	stop := context.AfterFunc(e.ctx, func() { cancel(context.Cause(e.ctx)) })
	release := func() { stop(); cancel(nil) }

	response, err := e.base.RoundTrip(r.WithContext(ctx))
	if err != nil {
		release()
		return nil, err
	}
	response.Body = releasing{response.Body, release}
	return response, nil
}

// releasing is a body that releases its context when it is closed.
type releasing struct {
	io.ReadCloser
	release func()
}

func (r releasing) Close() error {
	defer r.release()
	return r.ReadCloser.Close()
}
