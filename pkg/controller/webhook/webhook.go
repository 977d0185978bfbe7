// SPDX-License-Identifier: Apache-2.0

// Package webhook refuses ResourceClaims, ResourceClaimTemplates and DeviceClasses with wrong
// parameters for this driver when they are written. It answers the API server's admission reviews.
//
// It is a convenience, because the node's agent judges the parameters again when the claim is
// prepared: what cannot be judged is allowed, and the API server is configured to go on without an
// answer.
package webhook

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// Results of a review, in the metric.
const (
	allowed = "allowed"
	refused = "refused"
	unknown = "unknown" // allowed, because it could not be judged
)

// reviewer judges objects. It is an [admission.Handler].
type reviewer struct {
	reviews *prometheus.CounterVec
}

func newReviewer(registerer prometheus.Registerer) *reviewer {
	return &reviewer{reviews: promauto.With(registerer).NewCounterVec(prometheus.CounterOpts{
		Name: "xpu_webhook_reviews_total",
		Help: "Objects that the webhook was asked about, by resource and result: allowed, refused, or " +
			"unknown for those that it could not judge, which are allowed.",
	}, []string{"resource", "result"})}
}

// Handle answers a review.
func (r *reviewer) Handle(_ context.Context, request admission.Request) admission.Response {
	resource := request.Resource.Resource
	wrong, err := judge(&request.AdmissionRequest)
	switch {
	case err != nil:
		r.reviews.WithLabelValues(known(resource), unknown).Inc()
		return admission.Allowed("").WithWarnings("xpu-controller did not judge the parameters: " +
			short(err.Error()))
	case wrong != nil:
		r.reviews.WithLabelValues(resource, refused).Inc()
		return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{
			Result: &metav1.Status{
				Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity,
				Reason: metav1.StatusReasonInvalid, Message: message(wrong),
			},
		}}
	}

	r.reviews.WithLabelValues(resource, allowed).Inc()
	return admission.Allowed("")
}

// known returns a resource for the metric. Resources that are not judged have one name, because
// anyone who reaches the port could make up others without end.
func known(resource string) string {
	if _, ok := kinds[resource]; ok {
		return resource
	}
	return "_other"
}

// kind is how the objects of a resource are judged.
type kind struct {
	// devices returns the part of an object that validate judges.
	devices func(*object) devices
	// validate returns what is wrong.
	validate func(devices) error
}

// kinds are the resources of resource.k8s.io/v1 that have parameters. The API server converts
// objects of other versions.
var kinds = map[string]kind{
	"resourceclaims": {
		devices:  func(o *object) devices { return o.Spec.Devices },
		validate: func(d devices) error { return claim.ValidateClaim("spec.devices", d.claim()) },
	},
	"resourceclaimtemplates": {
		devices:  func(o *object) devices { return o.Spec.Spec.Devices },
		validate: func(d devices) error { return claim.ValidateClaim("spec.spec.devices", d.claim()) },
	},
	"deviceclasses": {
		devices:  func(o *object) devices { return devices{Config: o.Spec.Config} },
		validate: func(d devices) error { return claim.ValidateClass("spec", d.class()) },
	},
}

// judge returns what is wrong with the object of a request, or an error if it does not know.
func judge(request *admissionv1.AdmissionRequest) (wrong, _ error) {
	k, ok := kinds[request.Resource.Resource]
	if !ok || request.Resource.Group != resourceapi.GroupName ||
		request.Resource.Version != resourceapi.SchemeGroupVersion.Version ||
		request.SubResource != "" {
		return nil, errors.New("it is not a ResourceClaim, ResourceClaimTemplate or DeviceClass of " +
			resourceapi.SchemeGroupVersion.String())
	}

	switch request.Operation {
	case admissionv1.Create, admissionv1.Update:
	default:
		return nil, nil
	}

	object, err := decodeObject(request.Object.Raw)
	if err != nil {
		return nil, fmt.Errorf("decode the object: %w", err)
	}
	if object.Metadata.DeletionTimestamp != nil {
		return nil, nil
	}

	if request.Operation == admissionv1.Update {
		old, err := decodeObject(request.OldObject.Raw)
		if err != nil {
			return nil, fmt.Errorf("decode the old object: %w", err)
		}
		if reflect.DeepEqual(k.devices(old), k.devices(object)) {
			return nil, nil
		}
	}

	return k.validate(k.devices(object)), nil
}

// Limits of a message: who wrote the object controls it.
const (
	maxLines = 8
	maxLine  = 512 // bytes
)

// message returns the first lines of an error, for the answer.
func message(err error) string {
	lines := strings.Split(err.Error(), "\n")
	isMore := len(lines) > maxLines
	lines = lines[:min(len(lines), maxLines)]
	for i, line := range lines {
		lines[i] = short(line)
	}
	if isMore {
		lines = append(lines, "and more")
	}
	return strings.Join(lines, "\n")
}

func short(line string) string {
	if len(line) <= maxLine {
		return line
	}
	return strings.ToValidUTF8(line[:maxLine], "") + "..."
}
